"""Launch sizes for this GPU, by trial: `bench/gpu.sh tune` writes `vocab/backends/triton/sizes/NAME.json`.

What saves most is tried first, inside whole calls: each kernel's block and warps, and with it the decisions that hang
on it. The file is written anew after each part, so that a run which is ended leaves what it has found. A size that does
not launch is passed over with its reason.
"""

import copy
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

import logitless as ll
from bench.gpu.timing import Bench
from logitless.sample import triton_draw
from logitless.vocab.backends.triton import tuned as triton_tuned

Sizes = dict[str, int]
SHAPE, TINY = (4096, 4096, 128_256), (16, 16, 301)
THIN = 512  # hidden size where a kernel is tried whose work it does not change: the products beside it take less
BLOCKS, WARPS = (1024, 2048, 4096, 8192), (4, 8, 16)
GEMMS = (  # rows, entries, inner, warps, stages
    (128, 128, 64, 8, 3), (128, 128, 64, 8, 4), (128, 128, 64, 4, 3), (128, 256, 64, 8, 3), (64, 128, 64, 4, 4),
    (64, 256, 64, 8, 3), (16, 128, 64, 4, 5), (16, 128, 128, 4, 4), (32, 128, 128, 4, 4),
)  # fmt: skip
WEIGHING = (  # the same of the kernel that sums its products
    (128, 256, 64, 8, 3), (128, 256, 64, 8, 4), (256, 128, 64, 8, 3), (128, 128, 64, 8, 4), (128, 128, 64, 4, 3),
)  # fmt: skip
STREAMED_MIB = (16, 32, 64, 128)
TOKENS = (1, 16, 64, 256, 1024, 4096)
DRAWN = 64  # rows of a decode step


def names_of(shapes: tuple[tuple[int, ...], ...]) -> Iterator[Sizes]:
    """The shapes by the names that they have in a file."""
    return (dict(zip(("rows", "entries", "inner", "warps", "stages"), shape, strict=True)) for shape in shapes)


class Trial:
    """Calls that spend their time in one kernel each, on operands of a common shape."""

    def __init__(self, bench: Bench, shape: tuple[int, int, int]) -> None:
        self.bench = bench
        n, h, v = shape
        kind = {"device": bench.device, "dtype": torch.bfloat16 if bench.device == "cuda" else torch.float32}
        self.hidden = torch.randn(n, h, **kind)
        self.head = ll.LMHead(torch.randn(v, h, **kind) * 2 / h**0.5)
        self.labels = torch.randint(v, (n,), device=bench.device)

    def values(
        self, n: int | None = None, want: tuple[str, ...] = ("logprob", "entropy"), top_k: int = 0
    ) -> Callable[[], Any]:
        """Statistics of the first n tokens."""
        hidden, labels = self.hidden[:n], self.labels[:n]
        reference = (hidden.flip(0), self.head) if {"jsd", "kl"} & set(want) else None

        @torch.no_grad()
        def run() -> Any:
            return ll.token_stats(
                hidden, self.head, labels, want=want, top_k=top_k, reference=reference, backend="triton"
            )

        return run

    def frozen(self, want: tuple[str, ...]) -> Callable[[], Any]:
        """Statistics whose gradients of hidden states are products made on the way, of one basis or two."""
        hidden = self.hidden.detach().requires_grad_()
        reference = (self.hidden.flip(0), self.head) if "kl" in want else None
        return lambda: ll.token_stats(hidden, self.head, self.labels, want=want, reference=reference, backend="triton")

    def loss(self, trains_head: bool = False) -> Callable[[], Any]:
        """A loss with the gradient of hidden alone, two products, or of the head as well, three and their sums."""
        hidden = self.hidden.detach().requires_grad_()
        head = ll.LMHead(self.head.weight.detach().requires_grad_(trains_head))
        wrt = [hidden, head.weight] if trains_head else [hidden]

        def run() -> Any:
            loss = ll.linear_cross_entropy(hidden, head, self.labels, memory_budget=1 << 30, backend="triton")
            return torch.autograd.grad(loss, wrt)

        return run

    def draws(self, constants: Sizes) -> Callable[[], Any]:
        """A decode step, with the draw's own constants."""

        def run() -> Any:
            with patch.multiple(triton_draw, **constants):
                return ll.sample_tokens(self.hidden[:DRAWN], self.head, keep=20, memory_budget=1 << 28)

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
            print(f"    passed over: {type(error).__name__}: {(str(error).splitlines() or [''])[0][:100]}", flush=True)
            self.bench.wait()  # raises where it has broken the device for this process: then nothing more can be tried
            return float("inf")
        once = self.bench.seconds_of(step, 1)
        calls = max(1, min(20, round(0.05 / max(once, 1e-6))))
        return min(self.bench.seconds_of(step, calls) for _ in range(3))


def best_of(trial: Trial, sizes: dict[str, Any], candidates: Iterator[Sizes], step: Callable[[], Any]) -> None:
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


class Parts:
    """What is tried, in the order of what it may save: each part leaves what it has found in the sizes."""

    def __init__(self, bench: Bench, sizes: dict[str, Any], tiny: bool) -> None:
        n, h, v = TINY if tiny else SHAPE
        self.sizes, self.tiny = sizes, tiny
        self.whole, self.thin = Trial(bench, (n, h, v)), Trial(bench, (n, min(h, THIN), v))
        self.blocks, self.warps = ((256, 512), (4,)) if tiny else (BLOCKS, WARPS)

    def all(self) -> dict[str, Callable[[], None]]:
        thin = self.thin
        plain = thin.values(), thin.frozen(("logprob", "entropy"))
        best = thin.values(top_k=20), thin.values(want=("logprob", "entropy", "kl")), thin.frozen(("logprob", "kl"))
        whole = self.whole
        return {
            "sums by the kernel of the products": lambda: self.products("sums", whole.values()),
            "weights by the kernel of the products": lambda: self.products("weights", whole.loss(trains_head=True)),
            "plain": lambda: self.kernel("plain", lambda: [step() for step in plain]),
            "logits_grad": lambda: self.kernel("logits_grad", thin.loss()),
            "plain_basis": lambda: self.kernel("plain_basis", thin.frozen(("logprob",))),
            "best": lambda: self.kernel("best", lambda: [step() for step in best]),
            "draw": self.draw,
            "slices that are not kept": self.streams,
            "the next slice's products on a second stream": self.overlap,
            "accumulate": lambda: self.kernel("accumulate", thin.values(want=("logprob", "entropy", "rank"))),
            "look": lambda: self.kernel("look", thin.values(want=("jsd",))),
            "products and fold in one kernel": self.gemm,
        }

    @contextmanager
    def of_slices(self) -> Iterator[None]:
        """Calls have slices of logits, whatever the kernel of the products would save them."""
        with patch.dict(self.sizes["sums"], used=0), patch.dict(self.sizes["weights"], used=0):
            yield

    def kernel(self, name: str, step: Callable[[], Any]) -> None:
        """Block and warps."""
        sizes = ({"block": b, "warps": w} for b, w in product(self.blocks, self.warps))
        with self.of_slices():
            best_of(self.thin, self.sizes[name], sizes, step)

    def products(self, name: str, step: Callable[[], Any]) -> None:
        """The kernel that sums its products, or none; of a loss that trains its head, whose gradient it writes once."""
        self.sizes[name]["used"] = 0
        shapes = names_of(WEIGHING[:1] if self.tiny else WEIGHING)
        sizes = (shape | {"used": 1, "persistent": p} for shape, p in product(shapes, (1, 0)))
        best_of(self.whole, self.sizes[name], sizes, step)

    def draw(self) -> None:
        """Constants of the draw, which no file has: what is found is said."""
        found = {"BLOCK": triton_draw.BLOCK, "PROGRAMS": triton_draw.PROGRAMS}
        sizes = (
            {"BLOCK": b, "PROGRAMS": p} for b, p in product(self.blocks[:3], (528, 1056, 2112)[: 3 - 2 * self.tiny])
        )
        best_of(self.whole, found, sizes, self.whole.draws(found))
        print(f"    the fastest: {found}, constants of {triton_draw.__name__}")

    def streams(self) -> None:
        mib = ({"streamed_bytes": size << 20} for size in ((1,) if self.tiny else STREAMED_MIB))
        with self.of_slices():
            best_of(self.whole, self.sizes, mib, self.whole.values())

    def overlap(self) -> None:
        with self.of_slices():
            best_of(self.whole, self.sizes, iter(({"overlap": 1},)), self.whole.values())

    def gemm(self) -> None:
        sizes = self.sizes["gemm"]
        sizes.update(least_tokens=1, most_tokens=1 << 40)
        best_of(self.whole, sizes, names_of(GEMMS[-1:] if self.tiny else GEMMS), self.whole.values())
        shared_tokens(self.whole, sizes, self.whole.hidden.shape[0])


def tune(out: Path, tiny: bool, device: str, seconds: float, only: list[str]) -> int:
    """All of it that there is time for into `out`, or the parts whose names begin so; an exit status."""
    bench = Bench(device, time.monotonic() + seconds)
    kept = triton_tuned.table_for(torch.device(device))
    before, tried = copy.deepcopy(kept), []
    try:
        parts = Parts(bench, kept, tiny)
        asked = {name: part for name, part in parts.all().items() if name.startswith(tuple(only))}
        if not asked:
            print(f"no part's name begins with {' or '.join(only)}; they are {', '.join(parts.all())}")
            return 2
        for name, part in asked.items():
            if parts.whole.late:
                print(f"  {name}: no time left", flush=True)
                continue
            print(f"  {name}", flush=True)
            part()
            tried.append(name)
            write(out, kept, device, tried)
    finally:
        kept.update(before)
    print(f"wrote {out}" if tried else "wrote nothing: no time left")
    return 0


def write(out: Path, sizes: dict[str, Any], device: str, tried: list[str]) -> None:
    """The sizes so far, whole at any moment, with what was tried, and before by whoever tuned this device."""
    name = torch.cuda.get_device_name() if device == "cuda" else "interpreter"
    about = f"{name}, by bench/gpu.sh tune with torch {torch.__version__}; tried: {', '.join(tried)}"
    if sizes["about"].startswith(f"{name}, "):
        about = f"{sizes['about']}; {about}"
    part = out.with_name(f"{out.name}.part")
    part.write_text(json.dumps({**sizes, "about": about}, indent=2) + "\n")
    os.replace(part, out)
