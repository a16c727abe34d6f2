"""Sampling, scoring and generating with records."""
