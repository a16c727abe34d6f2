"""What the relaxation refuses, each on one line."""

import pytest
import torch

import logitless as ll
from logitless import relax
from logitless.errors import (
    ConfigError,
    DeviceError,
    DtypeError,
    GradientError,
    NotFiniteError,
    OptionError,
    ShapeError,
)
from logitless.relax import Noise
from logitless.vocab.head.quantised import QuantisedWeight
from tests.support.vocab.refusing import refused

B, H, V = 3, 4, 20
HIDDEN, HEAD, TABLE = torch.randn(B, H), ll.LMHead(torch.randn(V, H), vocab_size=V - 2), torch.randn(V, 5)
NOISE = Noise(torch.arange(B), torch.zeros(B, dtype=torch.int64))


def call(hidden=HIDDEN, head=HEAD, tau=1.0, k=3, **options):
    return lambda: relax.gumbel_topk(hidden, head, tau, k=k, **options)


def test_k():
    refused(OptionError, lambda: relax.gumbel_topk(HIDDEN, HEAD, 1.0), "k: expected", "0..18", "got 256")
    for k in (19, -1, 2.0, True):
        refused(OptionError, call(k=k), "k: expected a whole number in 0..18 (the vocabulary", f"got {k}")
    refused(OptionError, call(k=0), "embeddings: expected the tables", "k=0")


@pytest.mark.parametrize("k", [3, 0])
@pytest.mark.parametrize("tau", [0, -0.5, 1e-38, float("nan"), float("inf"), "1", None, True])
def test_tau(tau, k):
    refused(OptionError, call(tau=tau, k=k, embeddings=(TABLE,)), "tau: expected a number in 1e-24..1e+26", repr(tau))
    assert call(tau=1e-24, k=k, embeddings=(TABLE,))().embedded[0].isfinite().all()


@pytest.mark.parametrize("k", [3, 0])
def test_tables_of_another_vocabulary(k):
    for rows in (V - 3, V - 1, V + 1):
        wrong = torch.randn(rows, 5)
        refused(ShapeError, call(k=k, embeddings=(wrong,)), "expected (18 or 20, width)", f"({rows}, 5)", "[:18]")
    for rows in (V - 2, V):
        call(k=k, embeddings=(torch.randn(rows, 5),))()
    refused(DtypeError, call(k=k, embeddings=(torch.ones(V, 5).long(),)), "floating-point", "int64")
    refused(DtypeError, call(k=k, embeddings=(torch.nn.Embedding(V, 5),)), "Embedding", "module.weight")
    refused(OptionError, call(k=k, embeddings=TABLE), "a tuple of tables", "Tensor")
    refused(DeviceError, call(k=k, embeddings=(TABLE.to("meta"),)), "meta", "cpu")
    soft = call()()
    refused(ShapeError, lambda: relax.soft_embedding(soft, torch.randn(V + 5, 2)), "(25, 2)", "[:18]")
    refused(ShapeError, lambda: relax.soft_embedding(soft, torch.randn(V)), "(20,)")


@pytest.mark.parametrize("k", [3, 0])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_numbers_that_are_not_finite(value, k):
    hidden = HIDDEN.clone()
    hidden[1, 2] = value
    for head in (HEAD, ll.LMHead(HEAD.weight, softcap=5.0)):
        refused(
            NotFiniteError, call(hidden=hidden, head=head, k=k, embeddings=(TABLE,)), "in 1 of 3 tokens", "diverged"
        )
    weight = HEAD.weight.clone()
    weight[5] = value
    head = ll.LMHead(weight)
    refused(NotFiniteError, call(head=head, k=k, embeddings=(TABLE,)), "head: expected finite logits")


@pytest.mark.parametrize("k", [3, 0])
def test_noise(k):
    tables = (TABLE,)
    generator = torch.Generator()
    refused(OptionError, call(k=k, embeddings=tables, noise=NOISE, generator=generator), "noise or a generator")
    refused(OptionError, call(k=k, embeddings=tables, generator=5), "expected a torch.Generator or None, got 5")
    refused(OptionError, call(k=k, embeddings=tables, noise=torch.rand(B, V)), "Noise(seeds, positions)", "Tensor")
    wrong = Noise(torch.arange(B + 1), NOISE.positions)
    refused(ShapeError, call(k=k, embeddings=tables, noise=wrong), "seeds that broadcast to (3,)", "(4,)")
    wrong = Noise(NOISE.seeds, NOISE.positions.float())
    refused(DtypeError, call(k=k, embeddings=tables, noise=wrong), "positions as an integer tensor", "float32")
    elsewhere = Noise(*(x.to("meta") for x in NOISE))
    refused(DeviceError, call(k=k, embeddings=tables, noise=elsewhere), "meta", "cpu")


@pytest.mark.parametrize("k", [3, 0])
def test_what_the_pass_refuses(k):
    refused(ShapeError, call(hidden=torch.randn(B, H + 1), k=k, embeddings=(TABLE,)), "hidden: expected (..., 4)")
    refused(DtypeError, call(hidden=HIDDEN.long(), k=k, embeddings=(TABLE,)), "hidden", "floating-point")
    refused(DtypeError, call(head=TABLE, k=k, embeddings=(TABLE,)), "head: expected an LMHead")
    refused(OptionError, call(k=k, embeddings=(TABLE,), memory_budget=0), "memory_budget")


def test_the_whole_vocabulary_has_no_weights():
    soft = call(k=0, embeddings=(TABLE,))()
    assert soft.ids.shape == soft.weights.shape == (B, 0)
    refused(OptionError, lambda: relax.soft_embedding(soft, TABLE), "k=0", ".embedded")
    refused(OptionError, soft.dense, "k=0", ".embedded")


def test_steps_that_do_not_stack():
    refused(OptionError, lambda: relax.SoftTokens.stack([]), "steps of one shape")
    refused(OptionError, lambda: relax.SoftTokens.stack([call(k=3)(), call(k=4)()]), "steps of one shape")


@pytest.mark.parametrize("k", [3, 0])
def test_a_quantised_head(k):
    gguf = pytest.importorskip("gguf")
    blocks = gguf.quants.quantize(torch.randn(V, 32).numpy(), gguf.GGMLQuantizationType.Q8_0)
    head = ll.LMHead(QuantisedWeight.gguf(torch.from_numpy(blocks), "Q8_0"))
    refused(
        ConfigError, call(torch.randn(B, 32), head, k=k, embeddings=(TABLE,)), "a head of plain numbers, got a quant"
    )


@pytest.mark.parametrize("k", [3, 0])
def test_second_derivatives(k):
    hidden = HIDDEN.clone().requires_grad_()
    out = call(hidden=hidden, k=k, embeddings=(TABLE,))().embedded[0]
    with pytest.raises(GradientError, match="first-order"):
        torch.autograd.grad(out.sum(), hidden, create_graph=True)


@pytest.mark.parametrize("k", [3, 0])
def test_several_upstream_gradients_at_once_are_refused_in_one_line(k):
    hidden = HIDDEN.clone().requires_grad_()
    out = call(hidden=hidden, k=k, embeddings=(TABLE,))().embedded[0]
    with pytest.raises(GradientError, match="expected one upstream gradient"):
        torch.autograd.grad(out[:, 0], hidden, torch.eye(len(out), dtype=out.dtype), is_grads_batched=True)
