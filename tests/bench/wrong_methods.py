"""Methods that the gate must refuse, importable by a benchmark's own processes."""

from bench.cases import Case, Tensors, step


def entropy_in_bits(case: Case, tensors: Tensors):
    """Right log-prob, entropy in another unit."""

    def forward(**t):
        values = case.dense(**t)
        return values | {"entropy": values["entropy"] * 1.4427}

    return lambda: step(case, forward, tensors)


def raises(case: Case, tensors: Tensors):
    def run():
        raise RuntimeError("not on this machine\nand a second line")

    return run
