"""Model shapes by name."""
