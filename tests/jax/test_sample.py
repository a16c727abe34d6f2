"""`logitless.jax.sample_tokens` against the dense float64 oracle, against torch's, and as a distribution."""

import math
from functools import partial

import numpy as np
import pytest
import torch

jax = pytest.importorskip("jax", reason="jax is not installed: pip install 'logitless[jax]'")

import jax.numpy as jnp  # noqa: E402

import logitless as ll  # noqa: E402
from logitless.errors import NotFiniteError, OptionError  # noqa: E402
from logitless.jax import LMHead, Noise, SampleRecord, linear_topk, sample_tokens  # noqa: E402
from logitless.jax.sampling.record import names  # noqa: E402
from tests.support.jax.comparing import array  # noqa: E402
from tests.support.sample.dense import dense_record, some_noise  # noqa: E402

N, H, V = 13, 7, 211
RULES = {
    "all": {},
    "warm": {"temperature": 0.6},
    "greedy": {"temperature": 0.0, "top_p": 0.5},
    "top_k": {"top_k": 5, "keep": 3},
    "top_p": {"top_p": 0.8, "keep": 0},
    "top_p far": {"top_p": 0.99, "temperature": 3.0},
    "min_p": {"min_p": 0.02},
    "min_p far": {"min_p": 0.001, "temperature": 3.0},
    "together": {"top_k": 20, "top_p": 0.9, "min_p": 0.05, "temperature": 1.3, "keep": 30},
    "vLLM's order": {"top_p": 0.9, "min_p": 1e-4, "temperature": 3.0, "order": "vllm"},
    "vLLM's order together": {"top_k": 90, "top_p": 0.9, "min_p": 0.05, "keep": 2, "order": "vllm"},
    "top_p of a top_k": {"top_k": 90, "top_p": 0.9, "keep": 2},
}


def operands(dtype=torch.float64, v=V, **options):
    torch.manual_seed(0)
    bias = torch.randn(v, dtype=dtype)
    return torch.randn(N, H, dtype=dtype), ll.LMHead(torch.randn(v, H, dtype=dtype), bias, **options)


def in_jax(head):
    plain = {name: getattr(head, name) for name in ("scale", "softcap", "vocab_size")}
    return LMHead(array(head.weight), array(head.bias), **plain)


def noise_of(noise):
    return Noise(noise.seeds.numpy(), noise.positions.numpy())


STATIC = ("top_k", "top_p", "min_p", "order", "keep", "memory_budget")
draw_each = jax.jit(sample_tokens, static_argnames=STATIC)  # at a temperature of each token's own
draw = jax.jit(sample_tokens, static_argnames=(*STATIC, "temperature"))


def compare(hidden, head, noise, tolerance, **options):
    """Every field of the record equals the dense one, whatever the slices."""
    dense = {name: x for name, x in options.items() if name != "memory_budget"}
    expected = dense_record(hidden, head, noise, **dense)
    temperature = array(options.pop("temperature", 1.0))
    noise = noise_of(noise).expand((hidden.shape[0],))
    words = Noise(noise.low, np.asarray(noise.position).astype(np.int32), noise.high)
    run = draw if isinstance(temperature, float) else draw_each
    record = run(array(hidden), in_jax(head), words, temperature=temperature, **options)
    for name, want in expected.items():
        got = np.asarray(getattr(record, name))
        assert got.shape == want.shape, name
        if want.dtype == torch.int64:
            assert got.dtype == np.int32, name
            np.testing.assert_array_equal(got, want.numpy(), err_msg=name)
        else:
            np.testing.assert_allclose(got, want.numpy(), tolerance, tolerance, err_msg=name)
    return record


FAST = ("warm", "greedy", "top_p far", "together", "vLLM's order")


@pytest.mark.parametrize(
    "rules", [pytest.param(r, id=name, marks=[] if name in FAST else pytest.mark.slow) for name, r in RULES.items()]
)
def test_every_rule(rules):
    with jax.enable_x64(True):
        compare(*operands(), some_noise((N,)), 1e-10, **rules)


@pytest.mark.parametrize("name", ["all", "top_p far", pytest.param("together", marks=pytest.mark.slow)])
def test_slices_and_chunks(name):
    with jax.enable_x64(True):
        compare(*operands(), some_noise((N,)), 1e-10, memory_budget=30_000, **RULES[name])


@pytest.mark.parametrize("head", [{"softcap": 2.0}, {"vocab_size": 200, "scale": 0.5}], ids=["softcap", "padded"])
def test_every_head(head):
    with jax.enable_x64(True):
        compare(*operands(**head), some_noise((N,)), 1e-10, top_p=0.9, temperature=1.5)


def test_temperature_per_token():
    temperature = torch.tensor([0.0, 0.5, 1.0, 2.0] * 3 + [0.0], dtype=torch.float64)
    with jax.enable_x64(True):
        compare(*operands(), some_noise((N,)), 1e-10, temperature=temperature, top_p=0.9)


@pytest.mark.parametrize("v", [3, 3_000])
def test_zeros_of_either_sign_are_equal(v):
    """lax.top_k puts -0.0 behind 0.0."""
    zeros = jnp.full((v, 1), -1.0).at[1].set(-0.0).at[v - 1].set(0.0)
    record = sample_tokens(jnp.ones((1, 1)), LMHead(zeros), temperature=0, keep=2)
    assert record.token.tolist() == [1]
    assert record.topk_ids.tolist() == [[1, v - 1]]
    assert linear_topk(jnp.ones((1, 1)), LMHead(zeros), 2).ids.tolist() == [[1, v - 1]]


@pytest.mark.parametrize("temperature", [-1.0, math.inf, 1e27, 1e-37, True])
def test_temperatures_that_are_refused(temperature):
    draw = partial(sample_tokens, jnp.ones((2, 1)), LMHead(jnp.arange(3.0)[:, None]), Noise(1, 0), keep=1)
    with pytest.raises(OptionError, match=r"temperature: expected 0 \(greedy\) or a number in 1e-24..1e\+26, got"):
        draw(temperature=temperature)
    with pytest.raises(OptionError, match=r"temperature: expected 0 \(greedy\) or numbers in 1e-24..1e\+26"):
        draw(temperature=jnp.asarray([0.0, -1.0 if temperature is True else temperature]))
    with pytest.raises(OptionError, match=r"temperature: expected 0 \(greedy\) or numbers in 1e-24..1e\+26"):
        draw(temperature=jnp.asarray([0.0, jnp.inf], jnp.float16))
    assert draw(temperature=1e-24).behaviour_logprob.tolist() == [0.0, 0.0]
    low = sample_tokens(jnp.ones((1, 1)), LMHead(jnp.asarray([[-2e5], [-1e5]])), Noise(1, 0), keep=1, temperature=1e-24)
    assert (low.token.tolist(), low.behaviour_logprob.tolist()) == ([1], [0.0])


@pytest.mark.parametrize("rules", [{}, {"top_p": 0.999}], ids=["all", "whole rows"])
def test_a_bias_forbids_at_any_temperature(rules):
    bias = jnp.where(jnp.arange(231) % 2 == 0, -jnp.inf, 0.0)
    head, noise = LMHead(jnp.ones((231, 1)), bias), Noise(np.arange(40), 0)
    record = sample_tokens(jnp.ones((40, 1)), head, noise, temperature=1e26, **rules)
    assert (record.token % 2 == 1).all()
    assert record.n_kept.tolist() == [115] * 40
    np.testing.assert_allclose(record.logsumexp_at_temperature, np.log(115), rtol=1e-6)


@pytest.mark.parametrize("rules", [{}, pytest.param({"top_p": 0.999}, marks=pytest.mark.slow)])
def test_extreme_logits_ties_and_forbidden_entries(rules):
    hidden, head = operands()
    equal = ll.LMHead(head.weight[torch.arange(V) // 4], torch.zeros(V, dtype=torch.float64))  # four of each row
    bias = torch.full((V,), -math.inf, dtype=torch.float64)
    bias[[3, 50, 200]] = 0.0
    with jax.enable_x64(True):
        compare(hidden, equal, some_noise((N,)), 1e-10, **rules)
        compare(300 * hidden, head, some_noise((N,)), 1e-9, **rules)
        few = compare(hidden, ll.LMHead(head.weight, bias), some_noise((N,)), 1e-10, **rules)
        ids = tuple((bias == -math.inf).nonzero()[:, 0].tolist())
        capped = LMHead(array(head.weight), softcap=3.0)
        never = sample_tokens(array(hidden), capped, jax.random.key(0), forbidden=ids, **rules)
        z = 3.0 * np.tanh(np.asarray(array(hidden) @ capped.weight.T)[:, [3, 50, 200]] / 3.0)
        np.testing.assert_allclose(never.logsumexp, np.log(np.exp(z).sum(1)), 1e-10)
        assert set(np.asarray(never.token).tolist()) <= {3, 50, 200}
        assert never.n_kept.tolist() == [3] * N
    assert set(np.asarray(few.token).tolist()) <= {3, 50, 200}


@pytest.mark.parametrize("rules", [{}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.1}, {"temperature": 0.0}], ids=str)
def test_a_row_without_a_possible_entry_has_no_token(rules):
    """A typed error, or inside jit a token that is none and a log-sum-exp that says so; other rows are as ever."""
    hidden, noise = jnp.asarray([[0.0], [1.0]]), Noise(np.arange(2), 0)
    for wrong in (-math.inf, math.nan):
        nothing = LMHead(jnp.zeros((9, 1)), jnp.full(9, wrong))
        with pytest.raises(NotFiniteError, match="expected finite logits"):
            sample_tokens(hidden, nothing, noise, keep=2, **rules)
        found = draw(hidden, nothing, noise, keep=2, **rules)
        assert found.token.tolist() == [-1, -1], wrong
        assert found.n_kept.tolist() == [0, 0], wrong
        assert not np.isfinite(found.logsumexp).any(), wrong
    head = LMHead(jnp.zeros((9, 1)), jnp.full(9, -math.inf).at[4].set(0.0))
    assert draw(hidden, head, noise, keep=2, **rules).token.tolist() == [4, 4]


@pytest.mark.parametrize("rules", [{}, {"top_p": 0.9, "temperature": 0.8}, {"temperature": 0.0}])
def test_the_same_record_as_torch(rules):
    hidden, head = operands(torch.float32, v=1009, softcap=5.0)
    noise = some_noise((N,))
    expected = ll.sample_tokens(hidden, head, noise=noise, **rules)
    got = sample_tokens(array(hidden), in_jax(head), noise_of(noise), **rules)
    for name in names():
        want, x = getattr(expected, name).numpy(), np.asarray(getattr(got, name))
        assert (x.dtype, x.shape) == (want.dtype, want.shape), name
        np.testing.assert_allclose(x, want, 2e-6, 2e-6, err_msg=name)
    for name in ("logprob", "behaviour_logprob", "topk_logprob", "self_certainty", "tail_mass"):
        np.testing.assert_allclose(getattr(got, name), getattr(expected, name), 1e-5, 5e-6, err_msg=name)


def test_bf16_operands():
    hidden, head = operands(torch.float32)
    narrow, rows = array(hidden).astype(jnp.bfloat16), jax.tree.map(lambda x: x.astype(jnp.bfloat16), in_jax(head))
    noise = some_noise((N,))
    exact = ll.LMHead(head.weight.bfloat16().double(), head.bias.bfloat16().double())
    want = dense_record(hidden.bfloat16().double(), exact, noise, top_k=9)
    got = sample_tokens(narrow, rows, noise_of(noise), top_k=9)
    np.testing.assert_array_equal(got.token, want["token"])
    np.testing.assert_allclose(got.logsumexp, want["logsumexp"], 1e-5)


def test_frequencies():
    """Chi-square of 20,000 draws with nine degrees of freedom, from all entries and from a nucleus."""
    v, n = 10, 20_000
    head = LMHead(jax.random.normal(jax.random.key(0), (v, 3)))
    hidden = jnp.broadcast_to(jnp.array([1.0, -0.5, 2.0]), (n, 3))
    p = np.asarray(jax.nn.softmax(head.weight @ hidden[0] / 1.7), np.float64)
    counts = np.bincount(draw(hidden, head, Noise(7, jnp.arange(n)), temperature=1.7).token, minlength=v)
    assert ((counts - n * p) ** 2 / (n * p)).sum() < 27.9  # one in a thousand
    got = draw(hidden, head, jax.random.key(1), temperature=1.7, top_p=0.8)
    kept = np.argsort(-p)[: int(got.n_kept[0])]
    assert 2 <= len(kept) < v
    assert p[kept[:-1]].sum() < 0.8 <= p[kept].sum() + 1e-6
    q = n * p[kept] / p[kept].sum()
    assert ((np.bincount(got.token, minlength=v)[kept] - q) ** 2 / q).sum() < 27.9


def test_while_loop_and_vmap():
    """A decoding loop whose state carries the record, for two sequences of seeds of their own."""
    head = LMHead(jax.random.normal(jax.random.key(0), (19, 8)))
    table = jax.random.normal(jax.random.key(1), (19, 8))

    def one(seed):
        def step(state):
            t, h, kept = state
            part = sample_tokens(h, head, Noise(seed, t), keep=3, top_p=0.9)
            return t + 1, jnp.tanh(h + table[part.token]), kept.write(t, part)

        start = 0, jnp.ones(8), SampleRecord.empty((6,), keep=3, vocab_size=19)
        return jax.lax.while_loop(lambda state: state[0] < 5, step, start)[2]

    kept = jax.jit(jax.vmap(one))(jnp.array([3, 4]))
    h = jnp.ones(8)
    for t in range(5):
        z = head.weight @ h
        np.testing.assert_allclose(kept.logsumexp[1, t], jax.nn.logsumexp(z), 1e-5)
        np.testing.assert_allclose(kept.topk_logits[1, t], jax.lax.top_k(z, 3)[0], 1e-4)
        np.testing.assert_allclose(kept.token_logit[1, t], z[kept.token[1, t]], 1e-4)
        h = jnp.tanh(h + table[kept.token[1, t]])
    assert kept.token[:, 5].tolist() == [-1, -1]
    assert kept[0].shape == (6,)
    assert kept.reshape(12).keep == 3
    assert float(kept[1].perplexity) > 1


@pytest.mark.parametrize(("other", "message"), [({"keep": 1}, "keep=4, .* got 1"), ({"vocab_size": 9}, "got 9")])
def test_writing_a_part_of_another_record(other, message):
    options = {"keep": 4, "vocab_size": 19}
    with pytest.raises(OptionError, match=message):
        SampleRecord.empty((2, 3), **options).write((slice(None), 0), SampleRecord.empty((2,), **options | other))


def test_a_record_of_no_entries_from_ragged_chunks():
    record = sample_tokens(jnp.ones((7, 4)), LMHead(jnp.eye(33, 4)), temperature=0, keep=0, memory_budget=1000)
    assert record.topk_ids.shape == (7, 0)
    assert record.token.tolist() == [0] * 7


def test_forbidden_ids_of_any_array():
    options = {"temperature": 0, "keep": 1}
    hidden, head = jnp.ones((1, 4)), LMHead(jnp.eye(9, 4))
    for ids in ((0, 1), [0, 1], np.arange(2), jnp.arange(2), (0, 1) * 5):
        assert sample_tokens(hidden, head, forbidden=ids, **options).token.tolist() == [2]


@pytest.mark.parametrize(
    ("ids", "got"), [((8, 9), "9"), ((-1,), "-1"), (tuple(range(9)), "all of them"), ((*range(9), 0), "all of them")]
)
def test_forbidden_ids_that_are_none_or_all(ids, got):
    with pytest.raises(OptionError, match=rf"forbidden: expected some of the ids 0\.\.8, got {got}$"):
        sample_tokens(jnp.ones((1, 4)), LMHead(jnp.eye(9, 4)), temperature=0, keep=1, forbidden=ids)


def test_without_jit():
    hidden, head = jnp.ones((3, 4)), LMHead(jax.random.normal(jax.random.key(0), (33, 4)))
    usual = sample_tokens(hidden, head, Noise(1, 0), top_p=0.9)
    with jax.disable_jit():
        record = sample_tokens(hidden, head, Noise(1, 0), top_p=0.9)
    assert record.token.tolist() == usual.token.tolist()


def test_the_temperature_has_no_gradient():
    def share(temperature):
        head = LMHead(jnp.eye(33, 4))
        return sample_tokens(jnp.ones((3, 4)), head, Noise(1, 0), temperature=temperature).behaviour_logprob.sum()

    assert jax.grad(share)(0.7) == 0


def test_a_token_is_never_above_itself():
    """Where XLA multiplies and adds in one step for the record, and in two for the count."""
    hidden, weight = torch.randn(40, 1), 30 * torch.randn(7, 1)
    head = LMHead(array(weight), array(torch.randn(7)))
    record = sample_tokens(array(hidden), head, Noise(jnp.arange(40), 0), top_p=0.01, keep=1)
    np.testing.assert_array_equal(record.token, record.topk_ids[:, 0])
    np.testing.assert_array_equal(record.rank, 1)


def test_no_temporary_of_the_logits_size():
    hidden, head = jnp.ones((512, 64)), LMHead(jnp.ones((8192, 64)))
    run = jax.jit(lambda h, w, n: sample_tokens(h, w, n, top_p=0.9, memory_budget=1 << 21))
    noise = Noise(jnp.arange(512), jnp.zeros(512, int))
    assert run.lower(hidden, head, noise).compile().memory_analysis().temp_size_in_bytes < 1 << 22  # of 2²⁴


def test_forbidden_entries_have_ids_of_their_own():
    """In the record, where fewer than `keep` entries can be drawn: as those of a bias of -inf."""
    record = sample_tokens(jnp.ones((1, 4)), LMHead(jnp.eye(9, 4)), temperature=0, keep=3, forbidden=range(8))
    assert record.topk_ids.tolist() == [[8, 0, 1]]
    assert record.topk_logits.tolist() == [[0.0, -math.inf, -math.inf]]
    assert record.mean_logit.tolist() == [-math.inf]
