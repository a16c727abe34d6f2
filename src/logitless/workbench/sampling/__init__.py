"""`logitless sample`: its options and its run."""
