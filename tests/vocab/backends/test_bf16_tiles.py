"""Products of bf16 operands on a CPU that multiplies tiles of bf16: exact products, added up in fp32.

Elsewhere the same switch has oneDNN multiply them in fp32, so that these tests run on any processor.
"""

from typing import Any

import pytest
import torch

import logitless as ll
from logitless.vocab.backends import logits
from logitless.vocab.backends.compiled import library
from logitless.vocab.backends.logits import Factor
from logitless.vocab.reference import dense_token_stats
from tests.support.switches import put_back
from tests.support.vocab.comparing import EVERYTHING, Operands, assert_near_in_norm, operands

ONEDNN: Any = torch.backends.mkldnn
pytestmark = pytest.mark.skipif(not ONEDNN.is_available(), reason="this torch has no oneDNN")


@pytest.fixture(autouse=True)
def tiles(monkeypatch):
    """Whether each product so far was to be of tiles."""
    monkeypatch.setattr(logits, "has_bf16_tiles", lambda device_type: device_type == "cpu")
    if (found := library.library()) is not None:  # whose tiles are in tests/vocab/backends/compiled/test_pairs.py
        monkeypatch.setattr(found, "multiplies_tiles", lambda: 0)
    seen = []

    def watched(usual):
        def multiplied(*args, **kwargs):
            seen.append(ONEDNN.matmul.fp32_precision == "bf16")
            return usual(*args, **kwargs)

        return multiplied

    monkeypatch.setattr(torch, "mm", watched(torch.mm))
    for name in ("addmm_", "baddbmm_"):
        monkeypatch.setattr(torch.Tensor, name, watched(getattr(torch.Tensor, name)))
    with put_back():
        ONEDNN.matmul.fp32_precision = "none"
        yield seen
        assert ONEDNN.matmul.fp32_precision == "none"


EACH = torch.linspace(0.5, 2.0, 70)  # a temperature of its own for each token


@pytest.mark.parametrize(
    ("given", "temperature"),
    [
        pytest.param({}, 1.0, id="plain"),
        pytest.param({"scale": 0.3}, 0.7, id="scale and temperature"),
        pytest.param({"ranks": (4,)}, EACH, id="adapter, temperatures"),
        pytest.param({"softcap": 8.0, "scale": 0.3}, EACH, id="softcap, temperatures"),
        pytest.param({"bias": False, "reference": True}, 1.0, id="reference"),
    ],
)
@pytest.mark.parametrize("backend", ["eager", "compiled"])
def test_statistics_are_float64s(given, temperature, backend, tiles):
    x = operands((70,), 96, 3001, dtype=torch.bfloat16, **given).training()
    exact = x.to(torch.float64)
    want = EVERYTHING if x.ref is not None else ("logprob", "entropy", "self_certainty", "rank")

    def stats(x, **options):
        options |= {"reference": x.reference, "temperature": temperature}
        return ll.token_stats(x.hidden, x.head, x.labels, want=want, **options)

    found, right = stats(x, backend=backend), stats(exact)
    assert any(tiles)
    for name in want:
        torch.testing.assert_close(getattr(found, name).double(), getattr(right, name).double(), rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("trained", [("hidden",), ("hidden", "weight"), ("hidden", "weight", "bias")])
@pytest.mark.parametrize("loss", ["cross-entropy", "entropy"])
def test_gradients_are_no_worse_than_plain_bf16s(loss, trained, tiles):
    x = operands((300,), 64, 4096, dtype=torch.bfloat16, bias="bias" in trained).training(*trained)
    plain, exact = x.to(torch.bfloat16), x.to(torch.float64)
    if loss == "entropy":
        stats = ll.token_stats(x.hidden, x.head, x.labels, want=("logprob", "entropy"))
        (stats.entropy.sin() - stats.logprob).mean().backward()
    else:
        ll.linear_cross_entropy(x.hidden, x.head, x.labels).backward()
    assert tiles
    assert all(tiles)
    for y in (plain, exact):
        z = y.hidden @ y.weight.t() if y.bias is None else torch.nn.functional.linear(y.hidden, y.weight, y.bias)
        logp = (z if y is exact else z.float()).log_softmax(1)
        own = logp.gather(1, y.labels[:, None])[:, 0]
        entropy = -(logp.exp() * logp).sum(1)
        ((entropy.sin() - own) if loss == "entropy" else -own).mean().backward()
    for name, leaf in x.leaves.items():
        right = exact.leaves[name].grad
        most = (plain.leaves[name].grad.double() - right).norm() / right.norm()
        assert_near_in_norm(leaf.grad.double(), right, float(most), name)


@pytest.mark.parametrize("backend", ["eager", "compiled"])
def test_a_reference_near_by_leaves_reverse_kls_gradient_its_digits(backend, tiles):
    """At KL 1e-4 p - q is a hundredth of p: weights rounded to bf16 would lose a tenth of it."""
    x = operands((64,), 96, 4096, dtype=torch.bfloat16, bias=False).training("hidden")
    near = x.weight.float() * (1 + 0.005 * torch.randn(x.weight.shape))
    x.ref = Operands(x.hidden.detach(), near, None, None)
    exact = x.to(torch.float64)
    own = ll.token_stats(x.hidden, x.head, want=("reverse_kl",), reference=x.reference, backend=backend).reverse_kl
    own.mean().backward()
    right = dense_token_stats(exact.hidden, exact.head, None, want=("reverse_kl",), reference=exact.reference)
    right["reverse_kl"].mean().backward()
    assert 5e-5 < own.mean() < 2e-4
    assert set(tiles) == {True, False}  # the policy's, and the reference's
    assert (x.hidden.grad.double() - exact.hidden.grad).norm() < 3e-3 * exact.hidden.grad.norm()


@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float32), (torch.bfloat16, torch.float32)])
def test_other_operands_keep_their_digits(dtypes, tiles):
    hidden, weight = dtypes
    x = operands((70,), 96, 3001, dtype=torch.float32)
    given = x.hidden.to(hidden), ll.LMHead(x.weight.to(weight)), x.labels
    ll.token_stats(*given, want=("logprob", "entropy")).entropy.sum().backward()
    ll.linear_cross_entropy(*given).backward()
    assert tiles
    assert not any(tiles)


def test_float64s_do(tiles):
    """A call that computes in float64 keeps it, of whatever its operands are."""
    x = operands((9,), 32, 100, dtype=torch.bfloat16)
    factor = Factor(x.hidden, x.weight, 1.0, torch.float64, torch.bfloat16, None, None)  # ty: ignore
    assert not factor.in_tiles
