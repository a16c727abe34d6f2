"""Differentiable generation: T soft tokens, each read by the policy before the next."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from numbers import Real

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ..algebra.options import whole_from
from ..errors import OptionError, ShapeError
from ..vocab.face import LMHead, Noise
from .carry import Carried
from .kl import online_kl
from .tokens import SoftTokens, rows_in, same_table
from .topk import gumbel_topk, soft_at

CARRIES = ("sweeps", "cached", "recompute", "none")


@dataclass(frozen=True, eq=False)
class Reader:
    """A causal language model that reads embeddings, as three parts.

    body(embeds (B, n, H), mask (B, m + n), past (m, X) or None) -> (hidden (B, n, H'), piece (n, X)): the states that
    the head is called with, after m positions whose keys and values are `past`, and these n positions' own keys and
    values, flat. table: (V, H) as `body` reads its rows; head: called for every use.
    `integrations.transformers.soft_tokens.reader_of` makes one of a causal LM.
    """

    body: Callable[[Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor]]
    table: Tensor
    head: Callable[[], LMHead]


@dataclass(frozen=True)
class Sampling:
    """How to generate: `steps` soft tokens at temperature `tau` over the `k` best entries, one-hot where `hard`.

    k=0: over all entries, whose weights never exist (`generate` then wants to know the tables that read the tokens).

    carry: how the gradient goes through the steps.

        sweeps     sampled without gradient, then one pass over all positions, and backward sweeps
                   over it until what they add is below tolerance of the gradient. Exact after
                   steps - 1 sweeps; a few less, mostly.
        cached     one new position per step, keys and values kept in the graph. Exact, the least memory.
        recompute  the whole prefix anew at every step, as a widely copied implementation does. Exact.
        none       without gradient.

    checkpoint: keep what each step reads, and compute its activations anew in backward (cached and recompute).
    end: the id after which a sequence is finished, 0 or more; None: none is. most_sweeps: backward's sweeps stop after
    so many, whatever they still add; None: `steps`, which are exact. memory_budget: bytes of slices of the logits.
    Raises OptionError.
    """

    steps: int
    tau: float = 1.0
    k: int = 256
    hard: bool = True
    carry: str = "sweeps"
    checkpoint: bool = True
    end: int | None = None
    tolerance: float = 1e-6
    most_sweeps: int | None = None
    memory_budget: int | None = None

    def __post_init__(self) -> None:
        if self.carry not in CARRIES:
            raise OptionError(f"carry: expected one of {', '.join(CARRIES)}, got {self.carry!r}")
        object.__setattr__(self, "steps", whole_from("steps", self.steps, 1))
        for name, number in (("end", self.end), ("most_sweeps", self.most_sweeps)):
            if number is not None:
                object.__setattr__(self, name, whole_from(name, number, 0))
        if not (isinstance(self.tolerance, Real) and self.tolerance >= 0):
            raise OptionError(f"tolerance: expected a share of the gradient, 0 or more, got {self.tolerance!r}")


@dataclass(frozen=True, eq=False)
class Rollout:
    """What was generated: `soft` (B, T), `hidden` (B, T, H') that each was drawn from, `alive` (B, T) up to the end id.

    kl: (B, T) fp32, KL(policy‖reference) of each step, 0 past the end, and without a reference.
    Call `backward(loss)`, which for `sweeps` runs them, where `loss.backward()` and `autograd.grad(loss, ...)` raise
    GradientError; the number of sweeps is then `carried.sweeps`.
    """

    soft: SoftTokens
    hidden: Tensor
    alive: Tensor
    kl: Tensor
    carried: Carried | None = field(default=None, repr=False)

    def backward(self, loss: Tensor) -> None:
        """The gradient of a scalar of this rollout's tensors, into every parameter's `.grad`."""
        if self.carried is None:
            loss.backward()
        else:
            self.carried.backward(loss)


def generate(
    policy: Reader,
    prompts: Tensor,  # (B, P)
    mask: Tensor,  # (B, P)
    seeds: Tensor,  # (B,)
    sampling: Sampling,
    *,
    reference: Reader | None = None,
    tables: tuple[Tensor, ...] = (),  # (V, E) each
) -> Rollout:
    """T soft tokens, differentiable with respect to the policy through every step, and the KL to a reference.

    Dense equivalent, of cost T² and memory T·V:

        embeds = table[prompts]
        for t in range(steps):
            z = F.linear(body(embeds)[:, -1], head.weight)
            weights = F.gumbel_softmax(z, tau, hard)
            embeds = torch.cat([embeds, weights @ table], 1)

    prompts: int64, padded on the left; mask: 1 for tokens; seeds: each sequence's own noise, whose positions count from
    0 at the first new token: recomputation and batch order change nothing. The reference reads the same soft tokens
    (through its own table) without gradient, so an unchanged policy has a KL of 0 at every step.
    tables: with k=0 those that further models read the soft tokens by, in `soft.embedded` behind the models' own.
    Raises ShapeError, OptionError, and what `gumbel_topk` and `online_kl` raise. Memory that grows with T, for each
    sequence: k ids and weights (k=0: a row of each table), three rows of H, one position's keys and values; its
    activations with checkpoint=False. Price of k=0: `gumbel_topk`'s, for each sweep too.
    """
    _check(prompts, mask, seeds)
    first = policy.table[prompts]
    carried = None
    if sampling.k == 0:
        tables = _distinct(policy.table, *([] if reference is None else [reference.table]), *tables)
    else:
        tables = ()
    with torch.set_grad_enabled(torch.is_grad_enabled() and sampling.carry in ("cached", "recompute")):
        drawn, hidden = _steps(policy, first, mask, seeds, sampling, tables)
    soft = drawn
    if sampling.carry == "sweeps":
        soft, hidden, carried = _replay(policy, first, mask, seeds, sampling, drawn)
    alive = alive_until(soft.token, sampling.end)
    kl = torch.zeros(alive.shape, device=hidden.device)
    if reference is not None:
        seen = read(reference, prompts, mask, drawn, sampling.carry == "sweeps"), reference.head()
        with torch.set_grad_enabled(torch.is_grad_enabled() and sampling.carry != "none"):  # the head's too
            kl = online_kl(hidden, policy.head(), seen, alive=alive, memory_budget=sampling.memory_budget)
    if carried is not None:
        carried.watch(soft.weights, *soft.embedded, hidden, kl)
    return Rollout(soft, hidden, alive, kl, carried)


def _check(prompts: Tensor, mask: Tensor, seeds: Tensor) -> None:
    if prompts.shape != mask.shape or prompts.dim() != 2 or seeds.shape != prompts.shape[:1] or 0 in prompts.shape:
        got = ", ".join(str(tuple(x.shape)) for x in (prompts, mask, seeds))
        raise ShapeError(f"generate: expected prompts and mask (B, P) and seeds (B,), B and P at least 1, got {got}")
    if not mask[:, -1:].bool().all():  # its last position's state would be what the first token is drawn from
        raise OptionError("mask: expected prompts that are padded on the left, got one that ends with padding")


def alive_until(token: Tensor, end: int | None) -> Tensor:
    """(B, T) bool: no earlier token of the sequence was the end id; the first end id itself is alive."""
    if end is None:
        return torch.ones_like(token, dtype=torch.bool)
    ended = (token == end).long()
    return ended.cumsum(-1) - ended == 0


def _distinct(*tables: Tensor) -> tuple[Tensor, ...]:
    found: list[Tensor] = []
    for table in tables:
        if not any(same_table(table, known) for known in found):
            found.append(table)
    return tuple(found)


def _steps(
    policy: Reader, embeds: Tensor, mask: Tensor, seeds: Tensor, sampling: Sampling, tables: tuple[Tensor, ...]
) -> tuple[SoftTokens, Tensor]:
    """One soft token after the other: (soft (B, T), hidden (B, T, H'))."""
    softs: list[SoftTokens] = []
    states: list[Tensor] = []
    pieces: list[Tensor] = []
    whole = _extended(mask, sampling.steps)
    for t in range(sampling.steps):
        hidden, piece = _read_on(policy, embeds, whole[:, : mask.shape[1] + t], pieces, sampling.checkpoint)
        states.append(hidden[:, -1])
        noise = Noise(seeds, torch.full_like(seeds, t, dtype=torch.int64))
        soft = gumbel_topk(
            states[-1],
            policy.head(),
            sampling.tau,
            k=sampling.k,
            hard=sampling.hard,
            embeddings=tables,
            noise=noise,
            memory_budget=sampling.memory_budget,
        )
        softs.append(soft)
        row = rows_in(soft, policy.table)[:, None]
        if sampling.carry == "recompute":
            embeds = torch.cat([embeds, row], 1)
        else:
            embeds = row
            pieces.append(piece)
    return SoftTokens.stack(softs), torch.stack(states, 1)


def _read_on(
    model: Reader, embeds: Tensor, mask: Tensor, pieces: list[Tensor], keep_little: bool
) -> tuple[Tensor, Tensor]:
    """The body on new positions. The keys and values so far are joined within, so that a checkpoint keeps the pieces
    themselves (T in all), not what each step joined (T²)."""

    def body(embeds: Tensor, *pieces: Tensor) -> tuple[Tensor, Tensor]:
        return model.body(embeds, mask, torch.cat(pieces) if pieces else None)

    if keep_little and torch.is_grad_enabled():
        return checkpoint(body, embeds, *pieces, use_reentrant=False)  # type: ignore[return-value]
    return body(embeds, *pieces)


def _replay(
    policy: Reader, first: Tensor, mask: Tensor, seeds: Tensor, sampling: Sampling, drawn: SoftTokens
) -> tuple[SoftTokens, Tensor, Carried]:
    """All positions in one pass over the soft tokens that were drawn, as leaves of the graph."""
    with torch.no_grad():
        rows = rows_in(drawn, policy.table)[:, :-1]
    rows.requires_grad_()
    hidden = parallel(policy, torch.cat([first, rows], 1), mask, sampling.steps)
    noise = Noise(seeds[:, None], torch.arange(sampling.steps, device=seeds.device))
    noise = noise.expand(tuple(drawn.token.shape))
    head, tau, hard = policy.head(), sampling.tau, sampling.hard
    if sampling.k == 0:
        budget = sampling.memory_budget
        again = gumbel_topk(
            hidden, head, tau, k=0, hard=hard, embeddings=drawn.tables, noise=noise, memory_budget=budget
        )
        # what was drawn and read, with this pass's gradient: a token that rounding changes would be another text
        embedded = tuple(x + (y - y.detach()) for x, y in zip(drawn.embedded, again.embedded, strict=True))
        soft = replace(drawn, embedded=embedded)
    else:
        soft = soft_at(hidden, head, tau, drawn.ids, noise, hard=hard, outside=drawn.outside, token=drawn.token)
    produced = rows_in(soft, policy.table)[:, :-1]
    most = sampling.steps if sampling.most_sweeps is None else sampling.most_sweeps
    return soft, hidden, Carried(rows, produced, sampling.tolerance, most)


def parallel(model: Reader, embeds: Tensor, mask: Tensor, steps: int) -> Tensor:
    """The states (B, T, H') that the last `steps` tokens are drawn from, in one pass over (B, P + T - 1, H)."""
    return model.body(embeds, _extended(mask, steps), None)[0][:, -steps:]


def _extended(mask: Tensor, steps: int) -> Tensor:
    """The mask (B, P + T - 1) of all that is read to draw T tokens."""
    return torch.cat([mask, mask.new_ones(mask.shape[0], steps - 1)], 1)


@torch.no_grad()
def read(model: Reader, prompts: Tensor, mask: Tensor, soft: SoftTokens, at_once: bool) -> Tensor:
    """What a model's states (B, T, H') are where these soft tokens were drawn; in one pass, or as they were, in steps.

    The two differ by rounding, which a KL to a policy that was read in the other way would show.
    """
    first = model.table[prompts]
    rows = rows_in(soft, model.table)[:, :-1]
    if at_once:
        return parallel(model, torch.cat([first, rows], 1), mask, soft.token.shape[1])
    hidden, past = model.body(first, mask, None)
    states = [hidden[:, -1]]
    whole = _extended(mask, soft.token.shape[1])
    for t in range(rows.shape[1]):
        hidden, piece = model.body(rows[:, t : t + 1], whole[:, : mask.shape[1] + t + 1], past)
        past = torch.cat([past, piece])
        states.append(hidden[:, -1])
    return torch.stack(states, 1)
