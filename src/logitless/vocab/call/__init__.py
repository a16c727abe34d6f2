"""One call of the pass: its options and tensors, checked once, and the backend that serves it."""
