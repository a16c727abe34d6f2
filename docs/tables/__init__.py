"""Tables of the docs and the README from result files: `python -m docs.tables [--check]`."""
