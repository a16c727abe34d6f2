"""Benchmarks: `python -m bench.run`, then `python -m bench.plot FILE`."""
