"""Native sparse attention against full attention as the context grows: one layer's attention, forward and backward.

python -m bench.long_context.nsa [--lengths 1024 2048 4096 8192 16384 32768 --heads 4 --kv-heads 2 --dim 64 ...]

fp32, after the projections. `full` is torch's scaled_dot_product_attention (fused on the CPU), causal. `peak` counts
what operators allocate beside the inputs. Each pair is timed in turn in one run; compression's own product included.
"""

import argparse
from functools import partial
from pathlib import Path

import torch

from bench.harness import in_turns, least, results
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
    torch.autograd.grad(method(*tensors, parameters), tensors)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    for name, default in {"heads": 4, "kv_heads": 2, "dim": 64, "threads": 2, "rounds": 2}.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    parser.add_argument("--out", type=Path, help="write JSON lines here; must not exist")
    o = parser.parse_args(arguments)
    torch.set_num_threads(o.threads)
    write = results(o.out, sizes={name: getattr(o, name) for name in ("heads", "kv_heads", "dim", "threads")})
    parameters = NSAParameters(o.heads * o.dim, o.heads, o.dim, NSAOptions()).requires_grad_(False)
    for length in o.lengths:
        tensors, row = inputs(length, o), {"length": length}
        ways = {name: partial(once, way, tensors, parameters) for name, way in (("full", full), ("nsa", sparse))}
        for name, way in ways.items():
            with AllocationTracker() as tracker:
                way()
            row[name] = {"peak_bytes": tracker.peak}
        for name, turns in in_turns(ways, o.rounds).items():
            row[name]["seconds"] = round(least(turns, "wall"), 4)
        write(row)
        ratio = row["nsa"]["seconds"] / row["full"]["seconds"]
        print(
            f"{length:>7,} tokens: full {row['full']['seconds']:8.3f} s {row['full']['peak_bytes'] / 2**20:7.0f} MiB, "
            f"nsa {row['nsa']['seconds']:8.3f} s {row['nsa']['peak_bytes'] / 2**20:7.0f} MiB, ratio {ratio:.2f}"
        )


if __name__ == "__main__":
    main()
