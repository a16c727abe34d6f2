"""The table of docs/statistics.md lists the statistics that exist, and its formulas and gradients are true."""

import re
from pathlib import Path

import pytest
import torch

from logitless.algebra.stats import STATISTICS
from logitless.vocab.head.lm_head import LMHead
from logitless.vocab.reference import dense_token_stats

PAGE = Path(__file__).parents[2] / "docs" / "statistics.md"
BETA = 0.3
CANDIDATES = torch.tensor([[1, 4, 4]] * 5 + [[10, 0, 3]])


def rows() -> dict[str, list[str]]:
    """The cells of each row, by the statistic's name."""
    table = re.findall(r"^\| `(\w+)` \|(.+)\|$", PAGE.read_text("utf-8").partition("## By request")[0], re.MULTILINE)
    return {name: [cell.strip() for cell in cells.split(" | ")] for name, cells in table}


def test_the_table_lists_exactly_the_statistics():
    assert list(rows()) == list(STATISTICS)


@pytest.fixture(scope="module")
def numbers():
    """What the formulas may name, for one row of logits per token, in float64."""
    g = torch.Generator().manual_seed(3)
    z = (3 * torch.randn(6, 11, generator=g, dtype=torch.float64)).requires_grad_()
    z_ref = z.detach() + torch.randn(6, 11, generator=g, dtype=torch.float64)
    labels = torch.randint(11, (6,), generator=g)
    logp, logq = z.log_softmax(-1), z_ref.log_softmax(-1)
    p, q = logp.exp(), logq.exp()
    mixture = (1 - BETA) * p + BETA * q
    return {
        "z": z, "labels": labels, "logp": logp, "p": p, "logq": logq, "q": q, "logM": mixture.log(), "b": BETA,
        "e": (p - q) / mixture,
        "V": 11, "torch": torch, "z_label": z.gather(-1, labels[:, None]),
        "inside": torch.zeros(6, 11, dtype=torch.bool).scatter(1, CANDIDATES, True), "inf": torch.inf,
        "at_label": torch.nn.functional.one_hot(labels, 11), "at_max": torch.nn.functional.one_hot(z.argmax(-1), 11),
        "log": lambda x: torch.tensor(float(x), dtype=torch.float64).log(),
    }, z_ref  # fmt: skip


@pytest.mark.parametrize("name", STATISTICS)
def test_the_formula_and_the_gradient_are_true(name, numbers):
    known, z_ref = numbers
    formula, _, gradient, _ = rows()[name]
    z, eye = known["z"], torch.eye(11, dtype=torch.float64)
    value = eval(formula.strip("`"), known)
    true = dense_token_stats(
        z, LMHead(eye), known["labels"], want=(name,), reference=(z_ref, LMHead(eye)), jsd_beta=BETA,
        candidates=CANDIDATES,
    )[name]  # fmt: skip
    torch.testing.assert_close(value, true, rtol=1e-12, atol=1e-12)
    if STATISTICS[name].coefficients is None:
        assert gradient == "none"
        return
    (computed,) = torch.autograd.grad(true.sum(), z)
    written = eval(gradient.strip("`"), known | {"S": true[:, None]}) + torch.zeros_like(z)
    torch.testing.assert_close(written, computed, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", STATISTICS)
def test_needs_and_bases(name):
    _, needs, _, bases = rows()[name]
    row = STATISTICS[name]
    assert ("labels" in needs) == row.needs_label
    assert ("reference" in needs) == row.needs_reference
    assert ("candidates" in needs) == row.needs_candidates
    assert set(re.findall(r"`(\w+)`", bases)) == row.bases
