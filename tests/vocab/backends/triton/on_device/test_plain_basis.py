"""The kernels for a plain frozen head: sums, and the weights of p's product beside the slice, or of entropy's two."""

from dataclasses import replace

import torch
from torch import Tensor

import logitless as ll
from logitless.vocab.reference import dense_token_stats
from tests.support.plain import halved, over
from tests.support.vocab.comparing import Operands, operands
from tests.support.vocab.triton_calls import half_products, plain_kernel_alone, sizes

WANT, ENTROPY = ("logprob", "logsumexp"), ("logprob", "entropy")
EDGES = {"block": 64}  # with slices of 128 and more entries: several blocks, and a last one that is not whole
CUT = {torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float16: 2**-9}  # digits that the weights lose


def held(device: str, ops: Operands, want: tuple[str, ...] = WANT, within: float | None = None, **options) -> Tensor:
    """The gradient of hidden states from no other kernel, with statistics and gradient held to dense float64."""
    ops = replace(ops.training("hidden"), labels=None if ops.labels is None else ops.labels.clone()).on(device)
    true = ops.to(torch.float64)
    with half_products(device), sizes(device, plain=EDGES, plain_basis=EDGES), plain_kernel_alone():
        stats = ll.token_stats(ops.hidden, ops.head, ops.labels, want=want, backend="triton", **options)
        exact = dense_token_stats(
            true.hidden, true.head, true.labels, want=want, temperature=options.get("temperature", 1)
        )
        up = [torch.rand(ops.hidden.shape[0], device=device) for _ in want]
        (found,) = torch.autograd.grad([getattr(stats, name) for name in want], ops.hidden, up)
    (right,) = torch.autograd.grad([exact[name] for name in want], true.hidden, [x.double() for x in up])
    for name in want:
        torch.testing.assert_close(getattr(stats, name).double(), exact[name].detach(), rtol=2e-6, atol=2e-5, msg=name)
    assert float((found.double() - right).abs().max() / right.abs().max()) < (within or CUT[ops.hidden.dtype])
    return found


@halved
@over("budget", {"whole rows": None, "slices": 8_000})
@over("dtype", [torch.float32, torch.bfloat16, torch.float16])
@over("vocab", [2, 63, 256, 301])
def test_numbers_and_gradient_at_any_width(vocab, dtype, budget, device):
    held(device, operands((9,), 16, vocab, dtype=dtype, bias=False), memory_budget=budget)


@over("how", {"scale": {"scale": 0.3}, "turned over": {"scale": -1.7}, "padded rows": {"vocab_size": 290}})
@over("dtype", [torch.float32, torch.bfloat16])
def test_a_heads_own_factor_and_a_temperature(dtype, how, device):
    held(device, operands((9,), 16, 301, dtype=dtype, bias=False, **how), temperature=0.6, memory_budget=8_000)


def test_a_temperature_each(device):
    temperature = torch.rand(9, device=device) + 0.5
    held(device, operands((9,), 16, 301, dtype=torch.bfloat16, bias=False), temperature=temperature)


@over("budget", [None, 8_000])
def test_the_mean_logit_with_it(budget, device):
    ops = operands((9,), 16, 301, dtype=torch.float32, bias=False)
    held(device, ops, (*WANT, "self_certainty", "mean_logit"), within=1e-5, memory_budget=budget)


def test_no_labels(device):
    held(device, replace(operands((9,), 16, 301, dtype=torch.float32, bias=False), labels=None), ("logsumexp",))


@over("label", [0, 15, 16, 63, 64, 300])
def test_a_label_at_the_edge_of_a_block(label, device):
    ops = operands((6,), 16, 301, dtype=torch.float32, bias=False)
    ops.labels[:] = label
    ops.labels[1] = 7
    held(device, ops)


def risen(place: int, rise: float, dtype: torch.dtype) -> Operands:
    """Operands of which some rows have one entry whose logit is far above all others."""
    ops = operands((9,), 16, 301, dtype=torch.float32, bias=False)
    direction = torch.nn.functional.normalize(ops.hidden[:5].detach().sum(0), dim=0)
    with torch.no_grad():
        ops.hidden[:5] += direction
        ops.weight[place] = direction * rise
    return Operands(ops.hidden.detach().to(dtype), ops.weight.detach().to(dtype), None, ops.labels)


@halved
@over(
    "rise",
    {
        "a little": (5.0, torch.bfloat16),
        "in fp16": (50.0, torch.float16),
        "in bf16": (200.0, torch.bfloat16),
        "beyond fp32": (3000.0, torch.float32),
    },
)
@over("place", {"the same block": 40, "the same slice": 90, "a later slice": 180, "the end": 300})
def test_an_entry_far_above_those_before_it(place, rise, device):
    """Weights relative to the first entries would overflow: the slice is weighed again, what came before is scaled."""
    held(device, risen(place, *rise), memory_budget=8_000)


def test_digits_beside_an_entry_that_has_all_the_mass(device):
    """It is not the label: what is left over is kept apart from its 1, also where the level is below it."""
    weight = torch.zeros(1031, 1)
    weight[1000] = 30.0
    ops = Operands(torch.ones(1, 1), weight, None, torch.tensor([1000])).training("hidden").on(device)
    with sizes(device, plain_basis=EDGES), plain_kernel_alone():
        stats = ll.token_stats(ops.hidden, ops.head, ops.labels, backend="triton")
    exact = -torch.log1p(1030 * torch.exp(torch.tensor(-30.0, dtype=torch.float64)))
    torch.testing.assert_close(stats.logprob.double().cpu()[0], exact, rtol=1e-5, atol=0)


@over("entry", [3, 40, 300])
def test_one_number_that_is_not_one_is_seen(entry, device):
    ops = operands((3,), 1, 301, dtype=torch.float32, bias=False).training("hidden").on(device)
    with torch.no_grad():
        ops.weight[entry] = torch.nan
    with sizes(device, plain_basis=EDGES), plain_kernel_alone():
        stats = ll.token_stats(ops.hidden, ops.head, ops.labels, backend="triton")
        (found,) = torch.autograd.grad(stats.logprob.sum(), ops.hidden)
    assert stats.logprob.isnan().all()
    assert found.isnan().all()


@halved
@over("budget", {"whole rows": None, "slices": 8_000})
@over("dtype", [torch.float32, torch.bfloat16, torch.float16])
@over("vocab", [2, 63, 256, 301])
def test_entropy_at_any_width(vocab, dtype, budget, device):
    """Its weights are relative to the maximum so far, which a second look at the slice knows."""
    held(device, operands((9,), 16, vocab, dtype=dtype, bias=False), ENTROPY, memory_budget=budget)


@over("how", {"scale": {"scale": 0.3}, "padded rows": {"vocab_size": 290}})
@over("dtype", [torch.float32, torch.bfloat16])
def test_entropy_with_a_heads_own_factor_and_a_temperature(dtype, how, device):
    ops = operands((9,), 16, 301, dtype=dtype, bias=False, **how)
    held(device, ops, (*ENTROPY, "mean_logit"), temperature=0.6, memory_budget=8_000)


@over("label", [0, 15, 16, 63, 64, 127, 128, 300])
def test_entropy_with_a_label_at_the_edge_of_a_block(label, device):
    ops = operands((6,), 16, 301, dtype=torch.float32, bias=False)
    ops.labels[:] = label
    ops.labels[1] = 7
    held(device, ops, ENTROPY, memory_budget=6_000)


@over("rise", {"in bf16": (30.0, torch.bfloat16), "in fp32": (300.0, torch.float32)})
@over("place", {"the same slice": 90, "a later slice": 180, "the end": 300})
def test_entropy_with_an_entry_far_above_those_before_it(place, rise, device):
    """What came before is scaled, and p·log p's product gains what the maximum moved by times p's."""
    held(device, risen(place, *rise), ENTROPY, memory_budget=8_000)


def test_slices_are_as_long_as_the_budget_lets_them(device):
    """A program takes a row of any length: a slice and its weights, no kernel that holds whole rows."""
    ops = operands((512,), 8, 50_000, dtype=torch.bfloat16, bias=False).training("hidden").on(device)
    with half_products(device):
        said = ll.explain(ops.hidden, ops.head, ops.labels, memory_budget=100 << 20, backend="triton")
    assert said.slices.width > 30_000
    assert said.buffer_bytes <= 100 << 20
