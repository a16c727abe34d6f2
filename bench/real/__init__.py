"""Results on pretrained models that packages carry, each module a command: `python -m bench.real.NAME`."""
