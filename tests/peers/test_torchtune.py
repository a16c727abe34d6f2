"""torchtune's cases: chunked cross-entropies, KL losses in three directions, DPO, RSO and PPO."""

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

import logitless as ll
from tests.support.peers.cross_entropy import CrossEntropy
from tests.support.peers.outcomes import Operands, Within, assert_held, assert_same, cheapest, outcome, seeded

WITHIN = Within(1e-2, 1e-2)
LINEAR = [
    CrossEntropy(rows, width, vocab, dtype, WITHIN, ignored=ignored, ignore_index=index)
    for (rows, width, vocab), dtype, ignored, index in product(
        ((16, 16, 100), (150, 32, 50), (60, 24, 1000)),
        (torch.float32, torch.bfloat16),
        (0.0, 0.2, 1.0),
        (-100, 7),
    )
]


@pytest.mark.parametrize("case", cheapest(LINEAR, lambda case: case.cost), ids=str)
def test_cross_entropy(case):
    case.check()


@pytest.mark.calls_peer("torchtune", "torchao")
@pytest.mark.parametrize("chunks", [1, 8])
@pytest.mark.parametrize("case", [case for case in LINEAR if case.ignored < 1], ids=str)
def test_its_chunked_cross_entropy(case, chunks):
    from torchtune.modules.loss import CEWithChunkedOutputLoss

    loss = CEWithChunkedOutputLoss(chunks, case.ignore_index)

    def theirs(hidden: Tensor, weight: Tensor, bias: Any, labels: Tensor, class_weight: Any) -> Tensor:
        logits = torch.nn.functional.linear(hidden, weight, bias)[None]
        return loss(list(logits.chunk(chunks, dim=1)), labels[None])

    case.check_against(theirs)


# Forward here is the teacher's cross-entropy under the student: the divergence and the teacher's entropy.
DIRECTIONS = ("forward", "reverse", "symmetric")
DISTILLED = list(
    product(DIRECTIONS, (torch.bfloat16, torch.float32), ((3, 50, 50), (2, 4, 4)), (0.0, 0.2, 1.0), (0, 1))
)


def distilled_operands(dtype: torch.dtype, shape: tuple[int, int, int], ignored: float, seed: int) -> Operands:
    generator = seeded(seed)
    batch, length, vocab = shape
    labels = torch.randint(vocab, (batch, length), generator=generator)
    labels[torch.rand(batch, length, generator=generator) < ignored] = -100
    student, teacher = (torch.randn(*shape, generator=generator).to(dtype) for _ in range(2))
    return {"student": student, "teacher": teacher, "labels": labels}


def distilled_dense(direction: str):
    def function(student: Tensor, teacher: Tensor, labels: Tensor) -> Tensor:
        keep = labels != -100
        s, t = student.log_softmax(-1), teacher.log_softmax(-1).detach()
        each = {"forward": -(t.exp() * s).sum(-1), "reverse": (s.exp() * (s - t)).sum(-1)}
        each["symmetric"] = 0.5 * (each["forward"] + each["reverse"])
        return (each[direction] * keep).sum() / keep.sum().clamp_min(1)

    return function


def distilled_ours(direction: str):
    """Logits that exist are hidden states of a head that leaves them as they are."""

    def function(student: Tensor, teacher: Tensor, labels: Tensor) -> Tensor:
        head = ll.LMHead(torch.eye(student.shape[-1], dtype=student.dtype))
        stats = ll.token_stats(student, head, labels, want=("kl", "reverse_kl"), reference=(teacher, head))
        forward = stats.reverse_kl + ll.token_stats(teacher, head, labels, want=("entropy",)).entropy
        each = {"forward": forward, "reverse": stats.kl, "symmetric": 0.5 * (forward + stats.kl)}[direction]
        return each.sum() / (labels != -100).sum().clamp_min(1)

    return function


@pytest.mark.parametrize("given", cheapest(DISTILLED, lambda given: given[2][1], 3))
def test_divergence(given):
    direction, *rest = given
    operands = distilled_operands(*rest)
    exact = outcome(distilled_dense(direction), operands, ("student",), torch.float64)
    assert_held(outcome(distilled_ours(direction), operands, ("student",)), exact, WITHIN)


@pytest.mark.calls_peer("torchtune", "torchao")
@pytest.mark.parametrize("chunks", [0, 2, 8])
@pytest.mark.parametrize("given", [given for given in DISTILLED if given[3] < 1])
def test_its_divergence(given, chunks):
    from torchtune.modules import loss

    direction, *rest = given
    name = {"forward": "ForwardKL", "reverse": "ReverseKL", "symmetric": "SymmetricKL"}[direction]
    chunked = getattr(loss, f"{name}WithChunkedOutputLoss")(num_output_chunks=chunks or 1)

    def theirs(student: Tensor, teacher: Tensor, labels: Tensor) -> Tensor:
        if not chunks:
            return getattr(loss, f"{name}Loss")()(student, teacher, labels)
        parts = (list(x.chunk(chunks, dim=1)) for x in (student, teacher))
        return chunked(*parts, labels)

    operands = distilled_operands(*rest)
    ours = outcome(distilled_ours(direction), operands, ("student",))
    assert_same(ours, outcome(theirs, operands, ("student",)), WITHIN)


PAIRS = list(product(("dpo", "rso"), (0.05, 0.1, 0.5), (0.0, 0.1), (3, 17), (1.0, 20.0)))
NAMES = ("chosen", "rejected", "ref_chosen", "ref_rejected")


def pair_operands(pairs: int, spread: float) -> Operands:
    return {name: -spread * torch.rand(pairs, generator=seeded(i)) for i, name in enumerate(NAMES)}


def pair_dense(loss: str, beta: float, smoothing: float):
    def function(chosen: Tensor, rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor) -> Tensor:
        margin = beta * (chosen - rejected - ref_chosen + ref_rejected)
        if loss == "rso":
            return (1 - margin).clamp_min(0)
        kept, swapped = torch.log1p((-margin).exp()), torch.log1p(margin.exp())
        return (1 - smoothing) * kept + smoothing * swapped

    return function


def pair_ours(loss: str, beta: float, smoothing: float):
    if loss == "rso":
        return lambda **given: ll.losses.hinge(**given, beta=beta)
    return lambda **given: ll.losses.dpo(**given, beta=beta, label_smoothing=smoothing)


@pytest.mark.parametrize(("loss", "beta", "smoothing", "pairs", "spread"), PAIRS)
def test_pairs(loss, beta, smoothing, pairs, spread):
    operands = pair_operands(pairs, spread)
    exact = outcome(pair_dense(loss, beta, smoothing), operands, NAMES, torch.float64)
    assert_held(outcome(pair_ours(loss, beta, smoothing), operands, NAMES), exact, Within(1e-4, 1e-5))


@pytest.mark.calls_peer("torchtune", "torchao")
@pytest.mark.parametrize(("loss", "beta", "smoothing", "pairs", "spread"), PAIRS)
def test_its_pairs(loss, beta, smoothing, pairs, spread):
    from torchtune.rlhf.loss import DPOLoss, RSOLoss

    function = RSOLoss(gamma=beta) if loss == "rso" else DPOLoss(beta=beta, label_smoothing=smoothing)
    operands = pair_operands(pairs, spread)
    theirs = outcome(lambda **given: function(*given.values())[0], operands, NAMES)
    assert_same(outcome(pair_ours(loss, beta, smoothing), operands, NAMES), theirs, Within(1e-4, 1e-5))


CLIPPED = list(product((-1.0, -0.1, 0.0, 0.1, 1.0), (0.1, 0.2), (-1.0, 1.0, 2.0), (3, 9)))


def clipped_operands(shift: float, advantage: float, tokens: int) -> Operands:
    old = -torch.rand(2, tokens, generator=seeded()) * 2
    scale = torch.rand(2, tokens, generator=seeded(1)) + 0.5
    return {"logp": old + shift * scale, "old": old, "advantages": advantage * scale}


def clipped_dense(epsilon: float):
    def function(logp: Tensor, old: Tensor, advantages: Tensor) -> Tensor:
        r = (logp - old).exp()
        return torch.maximum(-advantages * r, -advantages * r.clamp(1 - epsilon, 1 + epsilon)).mean()

    return function


def clipped_ours(epsilon: float):
    return lambda logp, old, advantages: ll.losses.ppo_clip(logp, old, advantages, epsilon, epsilon).mean()


@pytest.mark.parametrize(("shift", "epsilon", "advantage", "tokens"), CLIPPED)
def test_clipped(shift, epsilon, advantage, tokens):
    operands = clipped_operands(shift, advantage, tokens)
    exact = outcome(clipped_dense(epsilon), operands, ("logp",), torch.float64)
    assert_held(outcome(clipped_ours(epsilon), operands, ("logp",)), exact, Within(1e-4, 1e-4))


@pytest.mark.calls_peer("torchtune", "torchao")
@pytest.mark.parametrize(("shift", "epsilon", "advantage", "tokens"), CLIPPED)
def test_its_clipped(shift, epsilon, advantage, tokens):
    from torchtune.rlhf.loss import PPOLoss

    loss = PPOLoss(epsilon=epsilon)
    operands = clipped_operands(shift, advantage, tokens)

    def theirs(logp: Tensor, old: Tensor, advantages: Tensor) -> Tensor:
        values = torch.zeros_like(old)
        return loss(old, logp, advantages, values, values, values)[1].mean()

    ours = outcome(clipped_ours(epsilon), operands, ("logp",))
    assert_same(ours, outcome(theirs, operands, ("logp",)), Within(1e-4, 1e-4))
