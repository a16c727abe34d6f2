"""Drawing tokens: the same as the eager backend draws, from the same logits, in a CUDA graph too."""

from dataclasses import replace

import torch
import torch.nn.functional as F

from logitless.errors import OptionError
from logitless.sample.record import names
from logitless.vocab.noise import Noise
from tests.support.plain import over, refusal, slow
from tests.support.vocab.comparing import Operands, operands
from tests.support.vocab.triton_calls import captured, drawn, whole_rows

RULES = {
    "noise alone": {},
    "greedy": {"temperature": 0},
    "a temperature": {"temperature": 0.7},
    "a temperature for each": {"temperature": [0.0, 1.0, 0.5, 9.0]},
    "top-k": {"top_k": 3},
    "top-k, top-p": {"top_k": 40, "top_p": 0.8},
    "top-p": {"top_p": 0.9, "temperature": 0.3},
    "min-p": {"min_p": 0.05},
    "vLLM's order": {"top_p": 0.8, "min_p": 0.05, "order": "vllm"},
}


def on(device: str, rules: dict) -> dict:
    """The rules with temperatures of each token as a tensor."""
    return {name: torch.tensor(x, device=device) if isinstance(x, list) else x for name, x in rules.items()}


def drawn_alike(ops: Operands, **rules: object) -> None:
    """Both backends draw four tokens of the same seeds and positions, and say the same of them."""
    device, seeds = ops.hidden.device, torch.randint(2**63 - 1, (4,))
    seeds[0] = -3
    noise = Noise(seeds.to(device), torch.arange(4, device=device) * 2**31)
    wanted, got = (drawn(ops, by, keep=5, noise=noise, **rules) for by in ("eager", "triton"))
    for name in names():
        mine, theirs = getattr(got, name), getattr(wanted, name)
        assert mine.dtype == theirs.dtype, name
        torch.testing.assert_close(mine, theirs, rtol=2e-6, atol=2e-6, msg=lambda m, name=name: f"{name}: {m}")


@over("rules", RULES, slow=["greedy", "a temperature", "min-p"])
def test_drawn(rules, device):
    ops = operands((4,), 9, 1031, dtype=torch.float32, bias=False).on(device)
    drawn_alike(ops, **on(device, rules))


def test_drawn_past_the_best_entries(device):
    drawn_alike(operands((4,), 9, 1031, dtype=torch.float32, spread=0.2, bias=False).on(device), top_p=0.999)


@slow
def test_drawn_from_a_flat_row_in_parts(device):
    drawn_alike(operands((4,), 9, 5003, dtype=torch.float32, spread=0.01, bias=False).on(device), temperature=5.0)


def test_drawn_with_impossible_entries_and_a_softcap(device):
    ops = operands((4,), 9, 1031, dtype=torch.float32, softcap=5.0, vocab_size=1030)
    with torch.no_grad():
        ops.bias[[1, 500]] = -torch.inf
    drawn_alike(ops.on(device))
    drawn_alike(ops.on(device), temperature=1e26)  # at which every other entry is as likely as any


@over("head", {"softcap": {"softcap": 6.0}, "no bias": {"bias": False}})
def test_whole_rows_are_logits(head, device):
    """What `sample_tokens` draws from."""
    ops = operands((7,), 5, 1031, dtype=torch.float32, **head).on(device)
    z = F.linear(ops.hidden, ops.weight, ops.bias)
    z = (torch.tanh(z / 6) * 6 if ops.head.softcap else z) / 0.6
    for rows, _, logits in whole_rows(ops, temperature=0.6, top_k=3):
        torch.testing.assert_close(logits, z[rows], rtol=1e-5, atol=1e-5)


def two_tokens(device: str) -> tuple[Operands, Noise]:
    noise = Noise(torch.arange(2, device=device), torch.zeros(2, dtype=torch.int64, device=device))
    return operands((2,), 7, 301, dtype=torch.float32, bias=False).on(device), noise


@over(
    "rules",
    {
        "noise alone": {},
        "a temperature for each": {"temperature": [0.0, 0.7]},
        "a nucleus of the best": {"temperature": 0.6, "top_k": 20, "top_p": 0.9},
    },
)
def test_drawn_in_a_cuda_graph(rules, device):
    ops, noise = two_tokens(device)
    rules = on(device, rules)
    plain = drawn(ops, noise=noise, **rules)
    found = captured(device, lambda: drawn(ops, noise=noise, **rules))
    for name in names():
        torch.testing.assert_close(getattr(found, name), getattr(plain, name))


def test_a_nucleus_past_the_best_entries_is_refused_in_a_cuda_graph(device):
    ops, noise = two_tokens(device)
    said = refusal(OptionError, lambda: captured(device, lambda: drawn(ops, noise=noise, top_p=0.9)))
    assert "in a CUDA graph" in said


def test_a_head_that_is_converted_by_slices_is_refused_in_a_cuda_graph(device):
    ops, noise = two_tokens(device)
    mixed = replace(ops, weight=ops.weight.detach().bfloat16())
    said = refusal(OptionError, lambda: captured(device, lambda: drawn(mixed, noise=noise, memory_budget=20_000)))
    assert "of one dtype" in said
