"""What every run shares: options, files, checkpoints, models, data, ranks and progress."""
