"""QuACK's cases: cross-entropy and softmax over many vocabularies, and its chunked linear cross-entropy.

Its kernels need CUTLASS and a GPU, so every case is held against the dense formula.
"""

from itertools import product
from typing import Any

import pytest
import torch

import logitless as ll
from tests.support.peers.cross_entropy import CrossEntropy
from tests.support.peers.outcomes import Within, cheapest, fit
from tests.support.peers.statistics import Statistics

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
VOCABULARIES = (192, 668, 1024, 1128, 4096, 32768, 128256, 262144)
WITHIN = {torch.bfloat16: Within(5e-3, 5e-2), torch.float16: Within(1e-3, 1e-2), torch.float32: Within(5e-5, 1e-3)}
FLAGS = (False, True)
SPREAD = 0.1  # of its logits


def on_logits(rows: int, vocab: int, dtype: torch.dtype, **options: Any) -> CrossEntropy:
    """A case on logits as one behind a head of 16 columns, of as many rows as a CPU can do."""
    kept, width, _ = fit(rows, 16, vocab)
    return CrossEntropy(min(rows, kept), width, vocab, dtype, WITHIN[dtype], spread=SPREAD, **options)


ON_LOGITS = [
    *(
        on_logits(rows, vocab, dtype, reduction="none", class_weight=weighted, ignored=ignored)
        for dtype, vocab, rows, weighted, ignored in product(DTYPES, VOCABULARIES, (1, 289), FLAGS, (0.0, 0.3))
    ),
    *(
        on_logits(rows, vocab, dtype, reduction="sum", class_weight=weighted, ignored=ignored)
        for dtype, vocab, rows, weighted, ignored in product(
            DTYPES, (192, 1024, 32768, 128256), (1, 77, 289), FLAGS, (0.0, 0.3)
        )
    ),
    *(
        on_logits(rows, vocab, dtype, reduction=reduction, class_weight=True)
        for dtype, vocab, rows, reduction in product(
            (torch.bfloat16, torch.float32), (1024, 32768, 128256), (77, 289), ("none", "mean", "sum")
        )
    ),
]
SUMMED = ("mean", "sum")
MODELS = list(product((8, 16, 24), (768, 1024), (32000, 50264, 128256)))  # tokens, width and vocabulary
SCALED = list(product((128, 600, 1024), (512, 768), (1536, 2048)))
ONE = (1024, 512, 2048)
CHUNKED = [
    CrossEntropy(*fit(*shape), torch.bfloat16, Within(1e-3, 2e-2), reduction, **options, spread=SPREAD)
    for shape, reduction, options in [
        *((shape, reduction, {"ignored": 0.0}) for shape, reduction in product(MODELS, SUMMED)),
        *((shape, reduction, {"ignored": 0.15}) for shape, reduction in product(SCALED, SUMMED)),
        *((ONE, reduction, {"ignored": 0.2, "ignore_index": 2047}) for reduction in SUMMED),
        *((ONE, reduction, {"ignored": 0.0, "trained": ()}) for reduction in SUMMED),
        *((ONE, "mean", {"ignored": 0.0, "trained": (name,)}) for name in ("hidden", "weight")),
    ]
]
CASES = [*ON_LOGITS, *CHUNKED]


@pytest.mark.parametrize("case", cheapest(CASES, lambda case: case.cost, 3), ids=str)
def test_cross_entropy(case):
    case.check()


SOFTMAX = [
    Statistics(("logprob", "sum_sq_prob"), min(rows, kept), width, vocab, dtype, WITHIN[dtype], spread=SPREAD)
    for dtype, vocab, rows in product(DTYPES, (192, 256, 760, 1024, 1128, 4096, 32768, 131072, 262144), (1, 199))
    for kept, width, _ in [fit(rows, 16, vocab)]
]


@pytest.mark.parametrize("case", cheapest(SOFTMAX, lambda case: case.cost), ids=str)
def test_softmax(case):
    """Its softmax, as far as a statistic reads it: the label's entry and the sum of squares."""
    case.check()


def own_logits(logits: torch.Tensor) -> tuple[torch.Tensor, ll.LMHead]:
    """Any logits as hidden states, behind the head that leaves them as they are."""
    return logits, ll.LMHead(torch.eye(logits.shape[-1], dtype=logits.dtype))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("level", [10.0, -10.0])
def test_equal_extreme_logits(dtype, level):
    hidden, head = own_logits(torch.full((16, 1024), level, dtype=dtype))
    loss = ll.linear_cross_entropy(hidden, head, torch.randint(1024, (16,)), reduction="none")
    torch.testing.assert_close(loss, torch.full((16,), 1024.0).log(), atol=1e-5, rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_one_large_logit(dtype):
    labels = torch.randint(1024, (16,))
    logits = torch.full((16, 1024), -10.0, dtype=dtype).scatter(-1, labels[:, None], 10.0)
    loss = ll.linear_cross_entropy(*own_logits(logits), labels, reduction="none")
    exact = torch.nn.functional.cross_entropy(logits.double(), labels, reduction="none")
    torch.testing.assert_close(loss.double(), exact, atol=0, rtol=1e-5)  # relative: the loss is 2e-6


@pytest.mark.parametrize("shift", [100.0, -100.0, 1000.0])
def test_a_constant_moves_nothing(shift):
    logits, labels = torch.randn(8, 512), torch.randint(512, (8,))
    loss = ll.linear_cross_entropy(*own_logits(logits + shift), labels, reduction="none")
    exact = torch.nn.functional.cross_entropy((logits + shift).double(), labels, reduction="none")
    torch.testing.assert_close(loss.double(), exact, atol=0, rtol=1e-6)


@pytest.mark.parametrize("label", [0, 1023])
def test_labels_at_either_end(label):
    logits, labels = 0.1 * torch.randn(16, 1024), torch.full((16,), label)
    loss = ll.linear_cross_entropy(*own_logits(logits), labels, reduction="none")
    exact = torch.nn.functional.cross_entropy(logits.double(), labels, reduction="none")
    torch.testing.assert_close(loss.double(), exact, atol=1e-6, rtol=1e-6)


def test_every_token_ignored():
    logits = 0.1 * torch.randn(16, 1024, requires_grad=True)
    loss = ll.linear_cross_entropy(*own_logits(logits), torch.zeros(16).long(), reduction="none", ignore_index=0)
    assert torch.equal(loss, torch.zeros(16))
    assert not torch.autograd.grad(loss.sum(), logits)[0].any()


def test_no_token():
    hidden, head = own_logits(torch.empty(0, 4096 // 64, dtype=torch.bfloat16).requires_grad_())
    loss = ll.linear_cross_entropy(hidden, head, torch.empty(0, dtype=torch.int64), reduction="none")
    assert loss.shape == (0,)
    assert torch.autograd.grad(loss.sum(), hidden)[0].shape == hidden.shape
