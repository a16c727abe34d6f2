"""Alignment by backpropagation through generated tokens, and the methods it is compared with."""
