"""What GPUs tell each other in one optimizer step: bytes that leave each of them, by what travels.

Ring algorithms: an all-reduce of b bytes among r sends 2·(r-1)/r·b, an all-gather or reduce-scatter half of that.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from logitless.algebra.costs import slices_of, traffic_of
from logitless.workbench.plan.setting import SHARDINGS, Setting, ceil_div
from logitless.workbench.plan.states import BF16, FP32, trained_parameters


@dataclass(frozen=True)
class Sent:
    """Bytes that leave each GPU in one optimizer step."""

    name: str
    nbytes: int


def traffic(setting: Setting) -> list[Sent]:
    """What a supervised step sends, largest first; rows of nothing are left out."""
    rows = [*_sharding(setting), *_tensor(setting), *_context(setting)]
    return sorted(
        (Sent(name, nbytes) for name, nbytes in rows if nbytes), key=lambda row: -row.nbytes
    )


def _ring(nbytes: int, ranks: int) -> int:
    """One way around: an all-gather or a reduce-scatter."""
    return nbytes * (ranks - 1) // ranks


def _sharding(setting: Setting) -> Iterator[tuple[str, int]]:
    """Gradients once a step; where they are divided, after every pass; weights gathered for each pass."""
    divided, ranks = SHARDINGS[setting.sharding], setting.shards
    trained = trained_parameters(setting) * (FP32 if setting.lora_rank else BF16)
    if "gradients" in divided:
        yield "gradients, reduce-scatter", setting.accumulation * _ring(trained, ranks)
    else:
        yield "gradients, all-reduce", 2 * _ring(trained, ranks)
    if "parameters" in divided:
        shape = setting.model
        whole = BF16 * ceil_div(shape.parameters, setting.tensor_parallel)
        head = BF16 * ceil_div(
            shape.embedding if shape.head == 0 else shape.head, setting.tensor_parallel
        )
        yield (
            "weights of the layers, all-gather twice",
            setting.accumulation * 2 * _ring(whole - head, ranks),
        )
        yield "weights of the head, all-gather once", setting.accumulation * _ring(head, ranks)
    elif "optimizer" in divided:
        yield "weights after the step, all-gather", _ring(trained, ranks)


def _tensor(setting: Setting) -> Iterator[tuple[str, int]]:
    """Hidden states of the embedding, and of each layer two each way; of the head a few numbers per token, and theirs.

    A layer that is computed again stops before its last sum, which in tiles is that of the last tile.
    """
    ranks = setting.tensor_parallel
    if ranks == 1:
        return
    hidden = 2 * _ring(BF16 * setting.tokens * setting.model.hidden, ranks)
    again = 2 * hidden - hidden // setting.mlp_tiles if setting.gradient_checkpointing else 0
    layers = setting.model.layers * (4 * hidden + again)
    yield "hidden states of the layers, all-reduce", setting.accumulation * (hidden + layers)
    n, vocab = setting.response_tokens, ceil_div(setting.model.vocab, ranks)
    tokens = slices_of(
        n, vocab, budget=setting.memory_budget, device="gpu", itemsize=FP32, whole=True
    ).tokens
    head = traffic_of(("logprob",), n, chunks=ceil_div(n, tokens), widths=(setting.model.hidden,))
    yield "the split head", setting.accumulation * head.sent(ranks)


def _context(setting: Setting) -> Iterator[tuple[str, int]]:
    """A layer gathers the other parts' keys and values, again if it is computed again, and sums their gradients."""
    ranks = setting.context_parallel
    key = ceil_div(setting.model.key, setting.tensor_parallel)
    passes = 3 if setting.gradient_checkpointing else 2
    nbytes = 2 * BF16 * setting.tokens * key * setting.model.layers
    yield (
        "keys and values, all-gather and reduce-scatter",
        setting.accumulation * passes * (ranks - 1) * nbytes,
    )
