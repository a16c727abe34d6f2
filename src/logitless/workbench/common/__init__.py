"""What every command shares: options, files that appear whole, locks, lines on the console, plots."""
