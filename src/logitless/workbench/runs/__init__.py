"""What every run of a trainer shares: its directory, checkpoints, callbacks, trackers, ranks and progress."""
