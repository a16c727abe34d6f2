"""Adapters to other libraries, one file each."""
