"""What a run needs on each GPU, by arithmetic alone."""
