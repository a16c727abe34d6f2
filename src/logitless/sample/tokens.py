"""`sample_tokens`: from hidden states to tokens, without the (N, V) logits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import astuple, replace

import torch
from torch import Tensor

from ..algebra.costs import Price
from ..algebra.rules import TEMPERATURES, Order, are_temperatures, is_drawing_temperature
from ..errors import OptionError, ShapeError
from ..vocab.face import (
    Call,
    LMHead,
    Noise,
    Pass,
    agreed,
    capturing,
    check_real,
    first_on_all,
    flatten,
    full_precision,
    load,
    on_all,
    with_lora,
)
from .draw import Change, recorded
from .record import SampleRecord
from .rules import Rules


@torch.compiler.disable(reason="logitless: sample_tokens breaks the graph; leave fullgraph=True out")
@torch.no_grad()
def sample_tokens(
    hidden: Tensor,  # (..., H)
    head: LMHead,
    *,
    temperature: float | Tensor = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    order: Order = "transformers",
    keep: int = 10,
    generator: torch.Generator | None = None,
    noise: Noise | None = None,
    memory_budget: int | None = None,
) -> SampleRecord:
    """One token for each hidden state, and a record of the distribution that it was drawn from.

    Dense equivalent, up to which random numbers come, with transformers' warpers of the same names:

        z = softcap(scale * F.linear(hidden, weight, bias))  # and the head's adapters
        p = min_p(top_p(top_k(z / temperature))).softmax(-1)
        token = torch.multinomial(p, 1)

    temperature: 0 for the best entry (the lowest id of equal ones), or 1e-24..1e26; a number or a tensor, broadcast
    to (...). top_k (0 is all), top_p, min_p: exact, in that order; with order="vllm" min_p comes first, so that top_p's
    share is of what it left. keep: how many of the best entries the record holds.
    The token is the best of z / temperature + Gumbel noise, noise that depends on nothing but a sequence's own seed, a
    position and a vocabulary id: noise: Noise(seeds, positions), so that no slice, batch order or rank changes a
    token; without it, a seed for each token is drawn from `generator`. Of a head that is sharded over ranks every rank
    gets the same record. No gradient.
    Price: one GEMM. A token whose kept entries may reach past the best 64 (or top_k, or keep, 1,024 of top_k at most)
    has its row, still in the buffer, read again, with no GEMM: nothing is approximate. Without rules noise is made in
    full for those entries only that it can lift above the best ones.
    Returns a SampleRecord of shape (...). Raises ShapeError, DtypeError, DeviceError, OptionError, NotFiniteError.
    Memory: whole rows of a few tokens within the budget (256 MiB unless given, up to 1 GiB on a GPU), or of one; then
    O(N·keep).
    """
    rules = on_all(head, lambda: Rules(top_k, top_p, min_p, order))
    return draw_tokens(
        hidden,
        head,
        rules,
        temperature=temperature,
        keep=keep,
        generator=generator,
        noise=noise,
        memory_budget=memory_budget,
    )


def draw_tokens(
    hidden: Tensor,  # (..., H)
    head: LMHead,
    rules: Rules,
    *,
    temperature: float | Tensor = 1.0,
    keep: int = 10,
    generator: torch.Generator | None = None,
    noise: Noise | None = None,
    memory_budget: int | None = None,
    change: Change | None = None,
) -> SampleRecord:
    """`sample_tokens`; with `change` tokens are drawn from change(z), called once on all rows (N, V) of logits.

    The record's fields of the raw distribution do not see the change. Its others are of change(z); where it moved the
    token's own logit, logsumexp_at_temperature is moved as much, so that `behaviour_logprob` is right.
    """

    def arguments() -> tuple[Call, Tensor, Noise, SampleRecord]:
        call = flatten(hidden, head, None, want=("logsumexp", "entropy"), memory_budget=memory_budget)
        lead, n = tuple(hidden.shape[:-1]), call.inputs.hidden.shape[0]
        temperatures = _temperatures(temperature, lead, hidden, call.compute).reshape(n)
        given = Noise(*(x.reshape(n) for x in Noise.of(lead, hidden.device, noise, generator)))
        record = SampleRecord.empty((0,), keep=keep, vocab_size=head.rows, dtype=call.compute, device=hidden.device)
        return call, temperatures, given, replace(record, processed=change is not None)

    call, temperatures, (seeds, positions), record = on_all(head, arguments)
    keep = record.keep  # a number of Python's, whatever was given
    call, budget = _halved(call, rules.retained(keep, head.rows))
    if head.shard is not None:
        options = (*astuple(rules), keep, noise is None, change is None)
        call = agreed(replace(call, alike=f"sample {options}"), temperatures, *(noise or ()))
    if noise is None:
        seeds = first_on_all(seeds, head.shard)
    run = Pass(with_lora(call), Price("values", 1, materialised=True), wide=True)
    if change is not None:
        run.slices = replace(run.slices, tokens=max(1, call.n_tokens))
    for rows, part in _parts(run, temperatures, Noise(seeds, positions), rules, keep, budget, change):
        if part.shape == temperatures.shape:
            return part.reshape(*hidden.shape[:-1])
        if not record.shape[0]:  # not before it is needed: each of its tensors is a launch
            record = record.map(lambda x: x.new_empty((call.n_tokens, *x.shape[1:])))
        record.write(rows, part)
    return record.reshape(*hidden.shape[:-1])


def _halved(call: Call, retained: int) -> tuple[Call, int]:
    """The call with half of its budget, and the other half, for rows that are read again."""
    options = call.options
    budget = max(1, call.budget // 2)
    want = (*options.want, "mean_logit") if load(options.backend).sums_logits_anyway else options.want
    return replace(call, options=replace(options, memory_budget=budget, top_k=retained, want=want)), budget


def _parts(
    run: Pass, temperatures: Tensor, noise: Noise, rules: Rules, keep: int, budget: int, change: Change | None
) -> Iterator[tuple[slice, SampleRecord]]:
    """(rows, their record), chunk by chunk; by the backend's own kernels where it has some that reach far enough."""
    with full_precision(temperatures.device.type):
        for rows, chunk in run.chunks():
            found, part = run.accumulate(chunk, keep="logits"), None
            some, own = noise.rows(rows), temperatures[rows].to(run.call.compute)
            if run.backend.draws_on_device and change is None:
                from . import triton_draw  # on first use: it imports triton

                part = triton_draw.recorded(chunk, found, own, some, rules=rules, keep=keep)
            if part is None:
                part = recorded(chunk, found, own, some, rules=rules, keep=keep, budget=budget, change=change)
            yield rows, part


def _temperatures(temperature: float | Tensor, lead: tuple[int, ...], hidden: Tensor, dtype: torch.dtype) -> Tensor:
    """A temperature for each token, or an error that says what is wrong."""
    if not isinstance(temperature, Tensor):
        if not is_drawing_temperature(temperature):
            raise OptionError(f"temperature: expected 0 (greedy) or a number in {TEMPERATURES}, got {temperature!r}")
        return torch.full(lead, float(temperature), dtype=dtype, device=hidden.device)
    check_real("temperature", temperature)
    if not capturing(hidden) and not bool(((temperature == 0) | are_temperatures(temperature.float())).all()):
        raise OptionError(f"temperature: expected 0 (greedy) or numbers in {TEMPERATURES}, got others")
    try:
        return temperature.to(hidden.device).expand(lead)
    except RuntimeError:
        got = tuple(temperature.shape)
        raise ShapeError(f"temperature: expected a number or a shape that broadcasts to {lead}, got {got}") from None
