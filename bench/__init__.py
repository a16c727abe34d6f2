"""Benchmarks: `python -m bench.run`, then `python -m bench.plot FILE`.

Each script's first lines say how it is started. `cpu/` and `gpu/` have what is asked of a processor, the other folders
what one command or subject of the library takes; `results/` has what was measured.
"""
