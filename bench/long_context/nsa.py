"""Native sparse attention against full attention as the context grows: one layer's attention, forward and backward.

python -m bench.long_context.nsa [--lengths 1024 2048 4096 8192 16384 32768 --heads 4 --kv-heads 2 --dim 64 ...]

fp32, after the projections. `full` is torch's scaled_dot_product_attention (fused on the CPU), causal. `peak` counts
what operators allocate beside the inputs. Each pair is timed in turn in one run; compression's own product included.
"""

import argparse
import time
from pathlib import Path

import torch

from bench.harness import environment, write_line
from logitless.models.nsa.attention import nsa
from logitless.models.nsa.layers import NSAParameters
from logitless.models.nsa.options import NSAOptions
from tests.support.allocations import AllocationTracker

LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768)


def inputs(length, o):
    generator = torch.Generator().manual_seed(length)
    shapes = (o.heads, length, o.dim), (o.kv_heads, length, o.dim), (o.kv_heads, length, o.dim), (3, o.heads, length)
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]


def full(query, key, value, gates, parameters):
    attended = torch.nn.functional.scaled_dot_product_attention(
        query[None], key[None], value[None], is_causal=True, enable_gqa=True
    )
    return (attended * gates.sum(0)[..., None]).sum()


def sparse(query, key, value, gates, parameters):
    compressed = parameters.compress(key, value)
    return nsa(query, key, value, *compressed, gates, query.shape[-1] ** -0.5, parameters.options).sum()


def once(method, tensors, parameters):
    begin = time.perf_counter()
    torch.autograd.grad(method(*tensors, parameters), tensors)
    return time.perf_counter() - begin


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    for name, default in {"heads": 4, "kv_heads": 2, "dim": 64, "threads": 2, "rounds": 2}.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    parser.add_argument("--out", type=Path)
    o = parser.parse_args(arguments)
    torch.set_num_threads(o.threads)
    parameters = NSAParameters(o.heads * o.dim, o.heads, o.dim, NSAOptions()).requires_grad_(False)
    rows = []
    for length in o.lengths:
        tensors, row = inputs(length, o), {"length": length}
        for name, method in (("full", full), ("nsa", sparse)):
            with AllocationTracker() as tracker:
                once(method, tensors, parameters)
            row[name] = {"peak_bytes": tracker.peak}
        times = {"full": [], "nsa": []}
        for _ in range(o.rounds):
            for name, method in (("full", full), ("nsa", sparse)):
                times[name].append(once(method, tensors, parameters))
        for name, seconds in times.items():
            row[name]["seconds"] = round(min(seconds), 4)
        rows.append(row)
        ratio = row["nsa"]["seconds"] / row["full"]["seconds"]
        print(
            f"{length:>7,} tokens: full {row['full']['seconds']:8.3f} s {row['full']['peak_bytes'] / 2**20:7.0f} MiB, "
            f"nsa {row['nsa']['seconds']:8.3f} s {row['nsa']['peak_bytes'] / 2**20:7.0f} MiB, ratio {ratio:.2f}"
        )
    if o.out:
        sizes = {name: getattr(o, name) for name in ("heads", "kv_heads", "dim", "threads")}
        for record in (environment() | {"sizes": sizes}, *rows):
            write_line(o.out, record)


if __name__ == "__main__":
    main()
