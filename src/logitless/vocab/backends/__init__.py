"""Backends of the pass. Each implements `fold` and `unfold`."""
