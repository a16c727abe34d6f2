"""Backends of the pass, each a class that keeps to the contract in `base`."""
