"""Launch sizes for this GPU, by trial: `bench/gpu.sh tune` writes `vocab/backends/triton/sizes/NAME.json`.

Each kernel's block and warps are tried inside whole calls; then for which numbers of tokens products and fold share a
kernel. A size that does not launch is passed over with its reason.
"""

import copy
import json
import time
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import torch

import logitless as ll
from bench.gpu_measure import Bench
from logitless.vocab.backends.triton import tuned as triton_tuned

Sizes = dict[str, int]
SHAPE, TINY = (4096, 4096, 128_256), (16, 16, 301)
BLOCKS, WARPS = (1024, 2048, 4096, 8192), (4, 8, 16)
GEMMS = (  # rows, entries, inner, warps, stages
    (128, 128, 64, 8, 3), (128, 128, 64, 8, 4), (128, 128, 64, 4, 3), (128, 256, 64, 8, 3), (64, 128, 64, 4, 4),
    (64, 256, 64, 8, 3), (16, 128, 64, 4, 5), (16, 128, 128, 4, 4), (32, 128, 128, 4, 4),
)  # fmt: skip
STREAMED_MIB = (16, 32, 64, 128)
TOKENS = (1, 16, 64, 256, 1024, 4096)


class Trial:
    """Calls that spend their time in one kernel each, on operands of a common shape."""

    def __init__(self, bench: Bench, tiny: bool) -> None:
        self.bench = bench
        n, h, v = TINY if tiny else SHAPE
        kind = {"device": bench.device, "dtype": torch.bfloat16 if bench.device == "cuda" else torch.float32}
        self.hidden = torch.randn(n, h, **kind)
        self.head = ll.LMHead(torch.randn(v, h, **kind) * 2 / h**0.5)
        self.labels = torch.randint(v, (n,), device=bench.device)

    def values(self, n: int | None = None, want: tuple[str, ...] = ("logprob", "entropy")) -> Callable[[], Any]:
        """Statistics of the first n tokens."""
        hidden, labels = self.hidden[:n], self.labels[:n]
        reference = (hidden.flip(0), self.head) if "jsd" in want else None

        @torch.no_grad()
        def run() -> Any:
            return ll.token_stats(hidden, self.head, labels, want=want, reference=reference, backend="triton")

        return run

    def loss(self) -> Callable[[], Any]:
        """A loss with the gradient of hidden alone: two products, fold, unfold."""
        hidden = self.hidden.detach().requires_grad_()

        def run() -> Any:
            return ll.linear_cross_entropy(hidden, self.head, self.labels, memory_budget=1 << 30, backend="triton")

        return run

    @property
    def late(self) -> bool:
        return time.monotonic() > self.bench.deadline

    def seconds(self, step: Callable[[], Any]) -> float:
        """Of the fastest of three timings; infinite where it does not run."""
        try:
            step()
            self.bench.wait()
        except Exception as error:  # too much shared memory, say: this size is not for this device
            print(f"    passed over: {type(error).__name__}: {str(error).splitlines()[0][:100]}")
            return float("inf")
        once = self.bench.seconds_of(step, 1)
        calls = max(1, min(20, round(0.05 / max(once, 1e-6))))
        return min(self.bench.seconds_of(step, calls) for _ in range(3))


def best_of(trial: Trial, sizes: dict[str, Any], candidates: Iterator[Sizes], step: Callable[[], Any]) -> float:
    """Leaves the fastest of the candidates that there is time for, and of what was there, in `sizes`."""
    found, fastest = dict(sizes), trial.seconds(step)
    for candidate in candidates:
        if trial.late:
            print(f"    no time left for {candidate} and what follows")
            break
        sizes.update(candidate)
        took = trial.seconds(step)
        print(f"    {candidate}: {1e3 * took:.3f} ms", flush=True)
        if took < fastest:
            found, fastest = dict(sizes), took
    sizes.update(found)
    return fastest


def shared_tokens(trial: Trial, gemm: Sizes, limit: int) -> None:
    """For which numbers of tokens one kernel for products and fold is the faster way."""
    wins = []
    for n in (n for n in TOKENS if n <= limit and not trial.late):
        gemm.update(least_tokens=1, most_tokens=0)
        apart = trial.seconds(trial.values(n))
        gemm.update(least_tokens=1, most_tokens=1 << 40)
        together = trial.seconds(trial.values(n))
        print(
            f"  {n} tokens: products, then fold {1e3 * apart:.3f} ms; in one kernel {1e3 * together:.3f} ms", flush=True
        )
        wins += [n] if together < apart else []
    gemm.update(least_tokens=min(wins, default=1), most_tokens=max(wins, default=0))


def tune(out: Path, tiny: bool, device: str, seconds: float) -> int:
    """All of it that there is time for into `out`; 0."""
    bench = Bench(device, time.monotonic() + seconds)
    trial, kept = Trial(bench, tiny), triton_tuned.table_for(torch.device(device))
    before = copy.deepcopy(kept)
    blocks, warps = ((256, 512), (4,)) if tiny else (BLOCKS, WARPS)
    try:
        steps = {
            "plain": trial.values(),
            "accumulate": trial.values(want=("logprob", "entropy", "rank")),
            "logits_grad": trial.loss(),
            "look": trial.values(want=("jsd",)),
        }
        for name, step in steps.items():
            print(f"  {name}", flush=True)
            sizes = ({"block": b, "warps": w} for b, w in product(blocks, warps))
            best_of(trial, kept[name], sizes, step)
        print("  slices that are not kept", flush=True)
        streams = ({"streamed_bytes": size << 20} for size in ((1,) if tiny else STREAMED_MIB))
        best_of(trial, kept, streams, steps["accumulate"])
        print("  the next slice's products on a second stream", flush=True)
        best_of(trial, kept, iter(({"overlap": 1},)), steps["accumulate"])
        print("  products and fold in one kernel", flush=True)
        kept["gemm"].update(least_tokens=1, most_tokens=1 << 40)
        names = ("rows", "entries", "inner", "warps", "stages")
        shapes = GEMMS[-1:] if tiny else GEMMS
        best_of(trial, kept["gemm"], (dict(zip(names, g, strict=True)) for g in shapes), trial.values())
        shared_tokens(trial, kept["gemm"], trial.hidden.shape[0])
        print("  a loss whose weights the kernel of the products writes", flush=True)
        weights = ({"used": 1, "persistent": p, **dict(zip(names, g, strict=True))} for g, p in product(shapes, (1, 0)))
        best_of(trial, kept["weights"], weights, trial.loss())
        name = torch.cuda.get_device_name() if device == "cuda" else "interpreter"
        result = {**kept, "about": f"{name}, by bench/gpu.sh tune with torch {torch.__version__}"}
    finally:
        kept.update(before)
    out.write_text(json.dumps(result, indent=2) + "\n")
    print(f"wrote {out}")
    return 0
