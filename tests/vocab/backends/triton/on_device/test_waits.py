"""A CUDA graph holds a step: nothing waits for the device, and launches are few. Memory stays within the budget."""

import unittest
from collections.abc import Callable

import torch

import logitless as ll
from logitless.sample import SamplingMask
from logitless.vocab.noise import Noise
from tests.support.allocations import trace_allocations
from tests.support.plain import over, refusal, slow
from tests.support.vocab.comparing import EVERYTHING, PAIRED, Operands, all_at_once, named_results, operands
from tests.support.vocab.triton_calls import captured, drawn
from tests.support.vocab.triton_seen import Launches, NoWaiting, Waits

Step = Callable[[], object]


def training_step(ops: Operands, budget: int | None) -> list[torch.Tensor]:
    """Everything that a training step asks for, ignored tokens among the others."""
    options = {"memory_budget": budget, "backend": "triton"}
    call = ops.hidden, ops.head, ops.labels
    loss = ll.linear_cross_entropy(*call, label_smoothing=0.1, **options)
    own = ll.token_loss(
        lambda s, x: -s.logprob * x - 0.1 * s.entropy + s.kl,
        *call,
        inputs=(torch.ones_like(ops.labels, dtype=ops.hidden.dtype),),
        want=("logprob", "entropy", "kl"),
        reference=ops.reference,
        **options,
    )
    stats = ll.token_stats(*call, want=("logprob", "entropy", "rank"), top_k=3, **options)
    total = loss + own + (stats.logprob * stats.entropy).sum() + stats.top_k_logits.sum()
    gradients = torch.autograd.grad(total, list(ops.leaves.values()))
    return [loss, own, stats.logprob, stats.rank, stats.top_k_ids, *gradients]


def trained(device: str) -> Operands:
    ops = operands((11,), 7, 301, dtype=torch.float32, reference=True)
    ops.labels[[2, 7]] = -100
    return ops.on(device)


@over("budget", [None, 20_000])
def test_a_training_step_in_a_cuda_graph(budget, device):
    """On a GPU a graph is captured and replayed; on a CPU what would wait is refused."""
    ops = trained(device)
    plain = [x.detach() for x in training_step(ops, budget)]  # a graph that stays alive would tie leaves to this stream
    found = captured(device, lambda: training_step(ops, budget))
    for mine, theirs in zip(found, plain, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


@over("budget", [None, 20_000])
def test_labels_are_looked_at_outside_a_graph(budget, device):
    if device == "cuda":
        raise unittest.SkipTest("what waits on a GPU is held by the graph that is captured there")
    ops = trained(device)
    with NoWaiting():
        said = refusal(AssertionError, lambda: training_step(ops, budget))
    assert "waits for the device" in said


@slow
@over(
    "leaves_want",
    {
        "everything": (("hidden", "weight", "bias"), EVERYTHING),
        "frozen head": (("hidden",), ("logprob", "entropy")),
    },
)
def test_every_option_in_a_cuda_graph(leaves_want, device):
    leaves, want = leaves_want
    ops, options = all_at_once(torch.float32, 100_000)
    ops = ops.on(device).training(*leaves)
    options["candidates"] = options["candidates"].to(device)
    options |= {"temperature": (torch.rand(13) + 0.5).to(device), "backend": "triton"}
    reference = ops.reference if set(want) & set(PAIRED) else None

    def step() -> list[torch.Tensor]:
        stats = ll.token_stats(ops.hidden, ops.head, ops.labels, want=want, reference=reference, **options)
        found = list(named_results(stats, want, options).values())
        total = sum((x * x).sum() for x in found if x.is_floating_point())
        return [*found, *torch.autograd.grad(total, list(ops.leaves.values()))]

    for mine, theirs in zip(captured(device, step), step(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def test_best_entries_in_fp64_in_a_cuda_graph(device):
    ops = operands((3,), 5, 61).on(device)

    def step() -> torch.Tensor:
        return ll.token_stats(ops.hidden.detach(), ops.head, None, want=(), top_k=7, backend="triton").top_k_logits

    torch.testing.assert_close(captured(device, step), step())


@over("ignored", [False, True])
def test_labels_are_asked_about_at_once(ignored, device):
    """One list of numbers a call, and where tokens are ignored which: nothing in backward."""
    ops = operands((9,), 7, 301, dtype=torch.float32, bias=False).training("hidden", "weight").on(device)
    ops.labels[2] = -100 if ignored else 5
    waits = Waits()
    with waits:
        candidates = ops.labels[:, None].clamp(0)
        stats = ll.token_stats(ops.hidden, ops.head, ops.labels, candidates=candidates, backend="triton")
        stats.logprob.sum().backward()
        ll.linear_cross_entropy(ops.hidden, ops.head, ops.labels, backend="triton").backward()
    assert waits.count == 2 * ignored


def a_draw(ops: Operands) -> Step:
    noise = Noise(torch.arange(3), torch.zeros(3, dtype=torch.int64))
    return lambda: drawn(ops, noise=noise)


def values(ops: Operands) -> Step:
    options = {"want": ("logprob", "entropy"), "backend": "triton", "memory_budget": 1 << 20}
    return torch.no_grad()(lambda: ll.token_stats(ops.hidden, ops.head, ops.labels, **options))


def a_loss(ops: Operands) -> Step:
    options = {"backend": "triton", "memory_budget": 1 << 20}
    return lambda: ll.linear_cross_entropy(ops.hidden, ops.head, ops.labels, **options).backward()


def over_sets(ops: Operands) -> Step:
    mask = SamplingMask.of([[label, (label + 1) % 301] for label in ops.labels.tolist()])
    options = {"want": ("logprob",), "backend": "triton", "sampling_mask": mask}
    return lambda: ll.token_stats(ops.hidden, ops.head, ops.labels, **options).logprob.sum().backward()


@over(
    "step_most", {"a draw": (a_draw, 20), "values": (values, 16), "a loss": (a_loss, 52), "over sets": (over_sets, 107)}
)
def test_launches_are_few(step_most: tuple[Callable[[Operands], Step], int], device):
    """A launch takes microseconds whatever it does, and a decode step has 300 of them in all."""
    if device == "cuda":
        raise unittest.SkipTest("kernels are counted as the interpreter runs them")
    step_of, most = step_most
    assert Launches().of(step_of(operands((3,), 7, 301, dtype=torch.float32, bias=False))) <= most


def budgeted(device: str) -> Operands:
    return operands((24,), 8, 4099, dtype=torch.float32, bias=False).on(device)


def test_memory_of_a_loss(device):
    """Slices within the budget, the gradients and a few numbers per token."""
    if device == "cuda":
        raise unittest.SkipTest("the room of torch's own kernels is the device's, and in no operator's result")
    n, h, v, budget = 24, 8, 4099, 1 << 17
    ops = budgeted(device)

    def run() -> None:
        ll.linear_cross_entropy(ops.hidden, ops.head, ops.labels, memory_budget=budget, backend="triton").backward()

    run()
    found = trace_allocations(run)
    assert found.largest <= max(budget, 4 * v * h)
    assert found.peak <= 1.15 * (budget + 4 * v * h) < 4 * n * v


def test_memory_of_values(device):
    n, h, budget = 24, 8, 1 << 17
    ops, want = budgeted(device), ("logprob", "entropy")
    options = {"want": want, "memory_budget": budget, "backend": "triton"}
    with torch.no_grad():
        found = trace_allocations(lambda: ll.token_stats(ops.hidden, ops.head, ops.labels, **options))
    assert found.peak <= budget + 80 * 4 * n + 4 * n * h * 3
