"""The vocabulary pass: the head, the public functions, the backends and the dense oracle."""
