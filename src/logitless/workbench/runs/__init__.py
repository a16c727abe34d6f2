"""What every run shares: options, files, checkpoints, ranks, progress and plots."""
