"""What the copied ways to read log-probs off logits hold at their peak: `python -m bench.logits.peaks`.

The functions as their tutorial writes them, on fake tensors of its shape, every storage counted: peaks in multiples of
the logits, the logits themselves included, without a gradient and with one. And what the copied `.half()` on a
self-certainty in fp32 costs, on random logits.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from bench.harness import MB, results
from bench.logits.table import DTYPES, Shape, batched, row_loop
from logitless.workbench.profile.storages import Tracker

Record = dict[str, Any]


def chunked(logits: Tensor, ids: Tensor, chunk_size: int = 2) -> Tensor:
    """The tutorial's middle ground, as written there."""
    results = []
    for i in range(0, logits.shape[0], chunk_size):
        chunk_logits = logits[i : i + chunk_size]
        chunk_ids = ids[i : i + chunk_size]
        chunk_log_probs = chunk_logits.log_softmax(dim=-1)
        results.append(torch.gather(chunk_log_probs, dim=2, index=chunk_ids.unsqueeze(-1)).squeeze(-1))
        del chunk_log_probs
    return torch.cat(results, dim=0)


METHODS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "batch": batched,
    "loop": row_loop,
    "chunk_size=2": chunked,
}


def peak_bytes(method: Callable[[Tensor, Tensor], Tensor], shape: Shape, dtype: torch.dtype, train: bool) -> int:
    """The most bytes alive at once, logits included."""
    with FakeTensorMode():
        logits = torch.empty(shape, dtype=dtype, requires_grad=train)
        ids = torch.empty(shape[:2], dtype=torch.long)
        tracker = Tracker(lambda: ("", ""), lambda func, args, kwargs: func(*args, **kwargs))
        tracker.know(logits, "logits")
        tracker.know(ids, "ids")
        with tracker:
            result = method(logits, ids)
            if train:
                result.sum().backward()
    return max(tracker.curve)


def peaks(shape: Shape) -> list[Record]:
    """A record for each method and dtype: ratios are to the bytes of the logits."""
    records = []
    for dtype, kind in DTYPES.items():
        logits = shape[0] * shape[1] * shape[2] * kind.itemsize
        for name, method in METHODS.items():
            scoring, training = (peak_bytes(method, shape, kind, train) for train in (False, True))
            record = {"kind": "loop peak", "method": name, "dtype": dtype, "logits_mb": logits / MB}
            record |= {"scoring_mb": scoring / MB, "training_mb": training / MB}
            records.append(record | {"scoring_ratio": scoring / logits, "training_ratio": training / logits})
    return records


def half_error(tokens: int = 256, vocab: int = 151_936, scale: float = 4.0) -> float:
    """The largest error, in nats, that `.half()` adds to logsumexp z - mean z; sure rows lie between 16 and 32."""
    logits = scale * torch.randn(tokens, vocab, generator=torch.Generator().manual_seed(0))
    certainty = logits.logsumexp(-1) - logits.mean(-1)
    return (certainty.half().double() - certainty.double()).abs().max().item()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="peaks of the copied loops over logits, counted")
    parser.add_argument("--shape", default="8,912,50000", help="batch,length,vocabulary")
    parser.add_argument("--out", type=Path, help="write JSON lines here; must not exist")
    options = parser.parse_args(argv)
    batch, length, vocab = (int(size) for size in options.shape.split(","))
    write = results(options.out, shape=(batch, length, vocab))
    records = [*peaks((batch, length, vocab)), {"kind": "half", "error_nat": half_error()}]
    for record in records:
        write(record)
    for r in records[:-1]:
        ratios = f"scoring {r['scoring_ratio']:.2f} x, training {r['training_ratio']:.2f} x"
        print(f"{r['dtype']} {r['method']:>13}: {ratios}")
    print(f".half() of a self-certainty: {records[-1]['error_nat']:.1e} nat")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
