"""What the layers of a family outside of the catalogue take: a trace of transformers' own, until each kind has come."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache
from itertools import accumulate

from torch import nn

from ...errors import ConfigError
from ...models.shapes import ModelShape, Traced
from ..profile.recording import Recording
from ..profile.step import Step, build, recorded
from ..profile.trace import landmarks

TOKENS = 8192  # a trace of more takes no longer
FEW = 512  # two chunks of the widest scan: one alone is another case, and a trace runs each step of a scan
OURS = ("activations", "activation gradients")


@cache
def as_traced(shape: ModelShape, rank: int = 0) -> ModelShape:
    """The shape with what transformers' layers take, with adapters of a rank or trained; unchanged without a trace."""
    tokens = FEW if shape.stateful else TOKENS
    step = Step(shape.name, tokens, loss="dense", attention="sdpa", optimizer="none", lora_rank=rank)
    try:
        model = _built(step)
        own = model.get_base_model() if rank else model  # pyright: ignore[reportCallIssue]
        name = (landmarks(own)[1] or "").rpartition(".")[0]
        layers = own.get_submodule(name)
        if not isinstance(layers, nn.ModuleList):
            return shape
        kinds = [_kind(layer) for layer in layers]
        counts = {kinds.index(kind): count for kind, count in Counter(kinds).items()}
        del layers[max(counts) + 1 :]
        once, twice = (
            _taken(recorded(replace(step, context_length=n), model), name, counts) for n in (tokens, 2 * tokens)
        )
    except ConfigError:  # what they do depends on their data, or adapters do not run in them
        return shape
    rates = [_rates(*pair, tokens, shape.stateful) for pair in zip(once, twice, strict=True)]
    (kept, kept_scores), (layer, layer_scores), (work, work_scores) = rates
    return replace(shape, traced=Traced(kept, layer, work, kept_scores, layer_scores, work_scores, rank))


def _built(step: Step) -> nn.Module:
    try:
        return build(step)
    except ConfigError:  # of a family without fused attention
        return build(replace(step, attention="auto"))


def _kind(layer: nn.Module) -> tuple[object, ...]:
    """What is equal of layers that do the same."""
    parts = [(name, type(part)) for name, part in layer.named_modules()]
    return (*parts, *((name, p.shape) for name, p in layer.named_parameters()))


def _rates(once: int, twice: int, tokens: int, stateful: bool) -> tuple[int, int]:
    """Bytes per token, and for each token of the sequence, from those of so many tokens and of twice as many."""
    scores = 0 if stateful else max(0, round((twice - 2 * once) / (2 * tokens * tokens)))
    return once // tokens - scores * tokens, scores


def _taken(recording: Recording, layers: str, counts: dict[int, int]) -> tuple[int, int, int]:
    """Bytes that all layers keep after the forward pass, that the largest keeps, and at work in it beyond these.

    counts: the first layer of each kind, and how many there are.
    """
    after = dict(recording.marks)["after full forward"]
    ours = [a for a in recording.allocations if a.category in OURS]
    change: Counter[int] = Counter()
    for a in ours:
        change[a.born] += a.nbytes
        change[a.died] -= a.nbytes
    events = sorted(change)
    alive = dict(zip(events, accumulate(change[event] for event in events), strict=True))
    kept, most, below = {}, {}, 0
    for i in range(max(counts) + 1):
        mine = [a for a in ours if f"{a.module}.".startswith(f"{layers}.{i}.")]
        kept[i] = sum(a.nbytes for a in mine if a.alive(after))
        most[i] = max((alive[a.born] for a in mine), default=below) - below
        below += kept[i]
    largest = max(kept[i] for i in counts)
    return sum(n * kept[i] for i, n in counts.items()), largest, max(most[i] for i in counts) - largest
