"""Apple's cut-cross-entropy: its cases of the loss, its z-loss, log-sum-exps and indexed products."""

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.peers.cross_entropy import CrossEntropy
from tests.support.peers.outcomes import Operands, Within, cheapest
from tests.support.peers.statistics import Statistics

SHAPES = ((256, 128, 512), (252, 128, 507), (252, 123, 507))  # tokens, width and vocabulary
BACKWARD = ((torch.float32, 5e-4), (torch.float16, 1e-3), (torch.bfloat16, 1e-2))
FORWARD = ((torch.float32, 1e-5), (torch.float16, 1e-3), (torch.bfloat16, 1e-2))
FLAGS = (False, True)
# Its z-loss weighs the mean square of the log-sum-exps with 1e-4. In a batch of 4 rows, `shift` drops one column of
# each: 4 tokens fewer here, since tokens and labels are aligned before the call.
LOSSES = [
    CrossEntropy(
        *(tokens - 4 * shift, width, vocab, dtype, Within(error, 1e-2), reduction, bias),
        ignored=0.2 * invalid,
        softcap=softcap,
        z_loss=1e-4 * (z_loss and reduction != "none"),
    )
    for (tokens, width, vocab), (dtype, error), softcap, bias, shift, invalid, reduction, z_loss in product(
        SHAPES, BACKWARD, (None, 20.0), FLAGS, FLAGS, FLAGS, ("none", "mean", "sum"), FLAGS
    )
    if not (z_loss and reduction == "none")
]
VALUES = [
    CrossEntropy(
        *(tokens - 8 * shift, width, vocab, dtype, Within(error, 1e-4), "none", bias),
        ignored=0.2 * invalid,
        softcap=softcap,
        trained=(),
    )
    for (tokens, width, vocab), (dtype, error), softcap, bias, shift, invalid in product(
        SHAPES, FORWARD, (None, 20.0), FLAGS, FLAGS, FLAGS
    )
]
PARTIAL = [
    CrossEntropy(256, 128, 512, torch.bfloat16, Within(1e-2, 1e-2), bias=True, trained=trained)
    for trained in (("hidden", "bias"), ("weight",), ("bias",))
]
SUMS = [
    Statistics((want,), tokens, width, vocab, dtype, Within(error, 1e-2), softcap=softcap, bias=bias, ignored=ignored)
    for want, (tokens, width, vocab), (dtype, error), softcap, bias, ignored in product(
        ("logsumexp", "label_logit"), SHAPES, BACKWARD, (None, 20.0), FLAGS, (0.0, 0.2)
    )
]
CASES = [*LOSSES, *VALUES, *PARTIAL]


@pytest.mark.parametrize("case", cheapest(CASES, lambda case: case.cost, 2), ids=str)
def test_cross_entropy(case):
    case.check()


@pytest.mark.parametrize("case", cheapest(SUMS, lambda case: case.cost), ids=str)
def test_log_sums_and_indexed_products(case):
    case.check()


# Of its own functions the one without a kernel runs on a CPU, eagerly; it has neither bias nor z-loss.
OWN = [case for case in CASES if not case.bias and not case.z_loss]


@pytest.mark.calls_peer("cut_cross_entropy")
@pytest.mark.parametrize("case", OWN, ids=str)
def test_its_cross_entropy(case):
    from cut_cross_entropy import linear_cross_entropy

    def theirs(hidden: Tensor, weight: Tensor, bias: Any, labels: Tensor, class_weight: Any) -> Tensor | Operands:
        options = {"softcap": case.softcap, "reduction": case.reduction, "impl": "torch_compile"}
        with torch.compiler.set_stance("force_eager"):
            return linear_cross_entropy(hidden, weight, labels, **options)

    case.check_against_rounded(theirs)  # its tests allow the error of plain logits beside the tolerance
