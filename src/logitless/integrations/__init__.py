"""Adapters to other libraries, a file or a folder for each."""
