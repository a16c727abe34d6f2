"""Bad input to `logitless.jax`: typed errors of one line, before anything is compiled."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch

jax = pytest.importorskip("jax", reason="jax is not installed: pip install 'logitless[jax]'")

import jax.numpy as jnp  # noqa: E402

import logitless  # noqa: E402
from logitless.errors import (  # noqa: E402
    ConfigError,
    DtypeError,
    GradientError,
    LabelError,
    NotFiniteError,
    OptionError,
    ShapeError,
)
from logitless.jax import (  # noqa: E402
    LMHead,
    Noise,
    linear_cross_entropy,
    linear_topk,
    sample_tokens,
    token_stats,
)

HIDDEN, LABELS = np.zeros((4, 3), np.float32), np.zeros(4, np.int32)  # made into jax arrays by the call
HEAD = LMHead(np.zeros((7, 3), np.float32))
QuantisedWeight = type("QuantisedWeight", (), {})  # known by its name: the torch side is not imported
NOISE = Noise(1, np.arange(4))
TORCH = torch.zeros(4, 3)


def draw(noise, **options):
    return sample_tokens(HIDDEN, HEAD, noise, **({"keep": 3} | options))


def of_z_loss(x):
    return linear_cross_entropy(HIDDEN, HEAD, LABELS, z_loss=x)


@pytest.mark.parametrize(
    ("error", "words", "call"),
    [
        (OptionError, "did you mean 'entropy'", lambda: token_stats(HIDDEN, HEAD, want=("entrpy",))),
        (
            ConfigError,
            "got a QuantisedWeight; dequantise",
            lambda: token_stats(HIDDEN, LMHead(QuantisedWeight()), LABELS),
        ),
        (
            ConfigError,
            r"expected no token_ids, .* LMHead\(target\.weight\[token_ids\]\)",
            lambda: LMHead(np.zeros((7, 3), np.float32), token_ids=np.arange(7)),
        ),
        (OptionError, "needs labels, got None", lambda: token_stats(HIDDEN, HEAD)),
        (OptionError, r"pass reference=\(hidden, head\)$", lambda: token_stats(HIDDEN, HEAD, want=("kl",))),
        (OptionError, "^k: expected .* in 1..7 .*, got 8", lambda: linear_topk(HIDDEN, HEAD, 8)),
        (OptionError, "^k: expected .* in 1..7 .*, got 0", lambda: linear_topk(HIDDEN, HEAD, 0)),
        (OptionError, "a number in 1e-24", lambda: token_stats(HIDDEN, HEAD, LABELS, temperature=0.0)),
        (OptionError, "expected values in 1e-24", lambda: token_stats(HIDDEN, HEAD, LABELS, temperature=jnp.zeros(4))),
        (OptionError, "infinite", lambda: token_stats(HIDDEN, HEAD, LABELS, temperature=jnp.full(4, jnp.inf))),
        (OptionError, "are zero", lambda: token_stats(HIDDEN, HEAD, LABELS, temperature=jnp.zeros(4, jnp.float16))),
        (OptionError, "jax.shard_map", lambda: token_stats(HIDDEN, HEAD, LABELS, axis_name="v")),
        (OptionError, "'mean', 'sum'", lambda: linear_cross_entropy(HIDDEN, HEAD, LABELS, reduction="avg")),
        (
            OptionError,
            "reduction='sum'",
            lambda: linear_cross_entropy(HIDDEN, HEAD, LABELS, reduction="sum", denominator=2),
        ),
        (OptionError, "1..7", lambda: token_stats(HIDDEN, LMHead(HEAD.weight, vocab_size=8), LABELS)),
        (OptionError, "softcap", lambda: LMHead(HEAD.weight, softcap=-1.0)),
        (OptionError, "before tracing", lambda: LMHead(HEAD.weight, scale=math.nan)),
        (OptionError, "before tracing", lambda: LMHead(HEAD.weight, scale=10**400)),
        (OptionError, "scale must be a finite number, in float32", lambda: LMHead(HEAD.weight, scale=1e39)),
        (OptionError, "z_loss: expected .* finite in float32", lambda: of_z_loss(1e300)),
        (OptionError, "positive number or None", lambda: LMHead(HEAD.weight, softcap=10**400)),
        (ShapeError, r"\(\.\.\., 3\)", lambda: token_stats(jnp.zeros((4, 2)), HEAD, LABELS)),
        (ShapeError, r"\(4,\)", lambda: token_stats(HIDDEN, HEAD, LABELS[:3])),
        (ShapeError, "broadcasts", lambda: token_stats(HIDDEN, HEAD, LABELS, temperature=jnp.ones(3))),
        (ShapeError, "one per row", lambda: token_stats(HIDDEN, LMHead(HEAD.weight, jnp.zeros(6)), LABELS)),
        (
            ShapeError,
            "same vocabulary",
            lambda: token_stats(HIDDEN, HEAD, LABELS, want=("kl",), reference=(HIDDEN, LMHead(jnp.zeros((6, 3))))),
        ),
        (DtypeError, "integer ids", lambda: token_stats(HIDDEN, HEAD, jnp.zeros(4))),
        (DtypeError, "floating-point", lambda: token_stats(jnp.zeros((4, 3), int), HEAD, LABELS)),
        (DtypeError, "LMHead", lambda: token_stats(HIDDEN, HEAD.weight, LABELS)),
        (OptionError, "keep: .*0..7", lambda: draw(NOISE, keep=8)),
        (OptionError, "top_p: .*0 < p", lambda: draw(NOISE, top_p=0.0)),
        (OptionError, "top_p: .*0 < p", lambda: draw(None, temperature=0, top_p=5)),
        (OptionError, "only temperature=0 does without", lambda: draw(None)),
        (OptionError, "0 \\(greedy\\) or", lambda: draw(NOISE, temperature=-1.0)),
        (OptionError, "0 \\(greedy\\) or", lambda: draw(NOISE, temperature=jnp.full(4, -1.0))),
        (OptionError, "0 \\(greedy\\) or", lambda: draw(NOISE, temperature="1")),
        (OptionError, "jax.random key, got int", lambda: draw(5)),
        (ShapeError, "broadcasts", lambda: draw(NOISE, temperature=jnp.ones(3))),
        (ShapeError, "positions that broadcast", lambda: draw(Noise(1, jnp.zeros(3, int)))),
        (DtypeError, "seeds as integers", lambda: draw(Noise(1.5, 0))),
        (NotFiniteError, "diverged", lambda: sample_tokens(HIDDEN * jnp.nan, HEAD, temperature=0, keep=1)),
        (OptionError, "32 bits", lambda: token_stats(HIDDEN, HEAD, LABELS, ignore_index=2**31)),
        (OptionError, "of Python's, got Array", lambda: token_stats(HIDDEN, HEAD, LABELS, jsd_beta=jnp.float32(0.3))),
        (OptionError, "positive number", lambda: linear_cross_entropy(HIDDEN, HEAD, LABELS, denominator=jnp.int32(0))),
        (OptionError, "positive number", lambda: linear_cross_entropy(HIDDEN, HEAD, LABELS, denominator="a")),
        (OptionError, "positive number", lambda: linear_cross_entropy(HIDDEN, HEAD, LABELS, denominator=10**400)),
        (
            OptionError,
            "finite in float32, got 1e",
            lambda: linear_cross_entropy(HIDDEN, HEAD, LABELS, denominator=1e39),
        ),
        (OptionError, "complex64", lambda: linear_cross_entropy(HIDDEN, HEAD, LABELS, denominator=jnp.asarray(2 + 1j))),
        (
            OptionError,
            "positive number, .* got inf",
            lambda: linear_cross_entropy(HIDDEN, HEAD, LABELS, denominator=jnp.asarray(jnp.inf)),
        ),
        (OptionError, "z_loss: .* before tracing", lambda: jax.jit(lambda x: of_z_loss(x))(0.1)),
        (OptionError, "positive number of bytes", lambda: token_stats(HIDDEN, HEAD, LABELS, memory_budget=0.5)),
        (
            ShapeError,
            r"candidates: .*, K\), got \(\)",
            lambda: token_stats(HIDDEN, HEAD, LABELS, candidates=np.int32(3)),
        ),
        (OptionError, r"Noise\(seeds, positions\)", lambda: draw(jnp.arange(4))),
        (OptionError, "seeds of 64 bits", lambda: draw(Noise(2**64, 0))),
        (OptionError, "whole numbers in a tuple", lambda: draw(NOISE, forbidden=3)),
        (OptionError, "whole numbers in a tuple", lambda: draw(NOISE, forbidden=(1.7,))),
        (OptionError, "whole numbers in a tuple", lambda: draw(NOISE, forbidden=(True,))),
        (LabelError, "0..6 or ignore_index=-100, got 7", lambda: token_stats(HIDDEN, HEAD, LABELS + 7)),
        (LabelError, "got -1", lambda: token_stats(HIDDEN, HEAD, LABELS, candidates=LABELS[:, None] - 1)),
    ],
)
def test_one_line_that_says_what_to_do(error, words, call):
    with pytest.raises(error, match=words) as caught:
        call()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("words", "call"),
    [
        ("hidden: .*floating-point array", lambda: token_stats(TORCH, HEAD, LABELS)),
        ("hidden: .*floating-point array", lambda: sample_tokens(TORCH, HEAD, NOISE, keep=3)),
        ("head weight: .*floating-point array", lambda: token_stats(HIDDEN, LMHead(TORCH), LABELS)),
        ("head weight: .*floating-point array", lambda: sample_tokens(HIDDEN, LMHead(TORCH), NOISE, keep=3)),
        ("head bias: .*floating-point array", lambda: token_stats(HIDDEN, LMHead(HEAD.weight, TORCH[0]), LABELS)),
        ("labels: .*array of integer ids", lambda: linear_cross_entropy(HIDDEN, HEAD, torch.arange(4))),
        ("temperature: .*floating-point array", lambda: token_stats(HIDDEN, HEAD, LABELS, temperature=TORCH[:, 0])),
        ("temperature: .*number or an array", lambda: draw(NOISE, temperature=TORCH[:, 0].bfloat16())),
        ("noise: .*seeds as integers", lambda: draw(Noise(torch.arange(4), 0))),
        ("noise: .*a jax.random key", lambda: draw(TORCH)),
        ("denominator: .*positive number", lambda: linear_cross_entropy(HIDDEN, HEAD, LABELS, denominator=TORCH[0])),
    ],
)
def test_tensors_of_torch_are_no_arrays(words, call):
    with pytest.raises((DtypeError, OptionError), match=rf"^{words}.*, got torch\.Tensor") as caught:
        call()
    assert "\n" not in str(caught.value)


def test_a_head_of_torch_is_another():
    head = logitless.LMHead(torch.zeros(7, 3))
    for call in (lambda: token_stats(HIDDEN, head, LABELS), lambda: sample_tokens(HIDDEN, head, NOISE, keep=3)):
        with pytest.raises(
            DtypeError, match=r"a logitless\.jax\.LMHead, got logitless\.vocab\..*LMHead; use"
        ) as caught:
            call()
        assert "\n" not in str(caught.value)


def test_whole_numbers_of_numpy():
    two, head = np.int64(2), LMHead(HEAD.weight, vocab_size=np.int64(6))
    assert type(head.vocab_size) is int
    assert token_stats(HIDDEN, head, LABELS, top_k=two).top_k_ids.shape == (4, 2)
    assert linear_topk(HIDDEN, head, two).ids.shape == (4, 2)
    for keep in (two, np.array(2), jnp.array(2)):
        record = sample_tokens(HIDDEN, head, NOISE, keep=keep, top_k=two, top_p=Fraction(9, 10))
        assert record.topk_ids.shape == (4, 2)
    assert record.vocab_size == 6


def test_a_fraction_is_a_temperature():
    halved, plain = (token_stats(HIDDEN, HEAD, LABELS, temperature=t).logprob for t in (Fraction(1, 2), 0.5))
    assert jnp.array_equal(halved, plain)


@pytest.mark.parametrize("kind", [np.float32, jnp.asarray, lambda x: jnp.asarray([x]), lambda x: np.asarray([[x]])])
def test_an_array_of_one_number_is_a_weight(kind):
    weights = {"label_smoothing": 0.25, "z_loss": 0.5}
    found, plain = (
        linear_cross_entropy(HIDDEN, HEAD, LABELS, **{name: make(x) for name, x in weights.items()})
        for make in (kind, float)
    )
    assert found == plain


@pytest.mark.parametrize("size", [True, 0, np.int64(0), 2.0])
def test_no_size_of_a_vocabulary(size):
    with pytest.raises(OptionError, match="vocab_size must be a positive whole number or None"):
        LMHead(HEAD.weight, vocab_size=size)


def test_a_statistic_that_was_not_asked_for():
    stats = jax.eval_shape(lambda: token_stats(HIDDEN, HEAD, LABELS))
    with pytest.raises(AttributeError, match="entropy is not among logprob"):
        _ = stats.entropy


@pytest.mark.parametrize("forwards", [jax.jacfwd, lambda f: lambda x: jax.jvp(f, (x,), (x,))], ids=["jacfwd", "jvp"])
@pytest.mark.parametrize(
    "call",
    [
        linear_cross_entropy,
        lambda *args: linear_cross_entropy(*args, reduction="none"),
        lambda *args: token_stats(*args).logprob,
        lambda hidden, head, labels: linear_topk(hidden, head, 2).logits,
    ],
    ids=["loss", "losses", "statistics", "top-k"],
)
def test_forward_mode(forwards, call):
    with pytest.raises(
        GradientError, match=r"expected reverse mode, .*; use jax.vjp, jax.grad or jax.jacrev"
    ) as caught:
        forwards(lambda hidden: call(hidden, HEAD, LABELS))(jnp.asarray(HIDDEN))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("twice", [jax.grad, jax.jacfwd], ids=["reverse", "forward"])
@pytest.mark.parametrize("call", [linear_cross_entropy, lambda *args: token_stats(*args).logprob.sum()])
def test_a_second_derivative(twice, call):
    with pytest.raises(GradientError, match="one derivative"):
        twice(lambda hidden: jax.grad(call)(hidden, HEAD, LABELS).sum())(jnp.asarray(HIDDEN))
