"""`logitless.integrations.gemma` against the package's own sampler and dense logits; run by `make test-gemma`."""

import dataclasses
import importlib
import sys
import warnings

import pytest

pytest.importorskip("gemma", reason="gemma is not installed here: make test-gemma")

import jax
import jax.numpy as jnp
import numpy as np
from gemma import gm
from gemma.gm.testing import DummyTokenizer
from gemma.gm.text import _prefill, _sampler_loop

from logitless.errors import ConfigError, NotFiniteError, OptionError
from logitless.integrations import gemma as ours

V = 700
PROMPTS = ["Hello there", "Hello world ! My name"]
SIZES = {"cache_length": 64, "max_out_length": 16, "pad_length": 8}
FIELDS = ("top_k_values", "top_k_indices", "logsumexp", "logit", "entropy")


class Tiny(gm.nn.Transformer):
    """A random Gemma 2: local and global attention, both softcaps."""

    config: gm.nn.config.TransformerConfig = gm.nn.config.TransformerConfig(
        num_embed=V,
        embed_dim=32,
        hidden_dim=64,
        num_heads=2,
        num_kv_heads=1,
        head_dim=16,
        final_logit_softcap=30.0,
        attention_types=(gm.nn.config.AttentionType.LOCAL_SLIDING, gm.nn.config.AttentionType.GLOBAL),
        sliding_window_size=8,
        use_post_attn_norm=True,
        attn_logits_soft_cap=50.0,
        use_post_ffw_norm=True,
    )


class Tokenizer(DummyTokenizer):
    """The package's own for tests, which knows 14 words; ids are read as numbers."""

    FORBIDDEN_TOKENS = (11,)

    def decode(self, ids):
        return " ".join(str(int(i)) for i in np.atleast_1d(ids))


MODEL = Tiny(dtype=jnp.float32)


@pytest.fixture(scope="module")
def params():
    made = MODEL.init(jax.random.key(0), jnp.zeros((1, 4), jnp.int32))["params"]
    keys = iter(jax.random.split(jax.random.key(1), 1000))
    # what layers add outweighs the token's own embedding, or a tied head repeats the prompt
    return jax.tree.map(lambda x: x + (4.0 if x.ndim == 1 else 0.2) * jax.random.normal(next(keys), x.shape), made)


def samplers(params, **options):
    options = SIZES | {"model": MODEL, "params": params, "tokenizer": Tokenizer()} | options
    keep = options.pop("keep", 10)
    return ours.Sampler(**options, keep=keep), gm.text.Sampler(**options)


def dense(params, prompt, tokens):
    """Logits of each predicted token from one pass over the whole sequence, without a cache."""
    ids = Tokenizer().encode(prompt, add_bos=True)
    whole = jnp.asarray([*ids, *tokens.tolist()])[None]
    logits = MODEL.apply({"params": params}, tokens=whole).logits[0, len(ids) - 1 : -1]
    return np.array(logits.at[:, 11].set(-jnp.inf))


def check(params, prompt, state, row, steps, keep=10):
    """The fields of one sequence against dense logits; blank after `steps`."""
    fields = {name: np.asarray(getattr(state, f"predicted_{name}"))[row] for name in FIELDS}
    tokens = np.asarray(state.predicted_tokens)[row, :steps]
    z = dense(params, prompt, tokens)
    values, ids = jax.lax.top_k(z, keep)
    near = {"rtol": 2e-4, "atol": 2e-4}
    np.testing.assert_allclose(fields["top_k_values"][:steps], values, **near)
    np.testing.assert_array_equal(fields["top_k_indices"][:steps], ids)
    np.testing.assert_allclose(fields["logsumexp"][:steps], jax.nn.logsumexp(z, 1), **near)
    np.testing.assert_allclose(fields["logit"][:steps], z[np.arange(steps), tokens], **near)
    p = jax.nn.softmax(z)
    np.testing.assert_allclose(fields["entropy"][:steps], -jnp.where(p > 0, p * jnp.log(p), 0).sum(1), **near)
    for name, x in fields.items():
        assert (x[steps:] == (-1 if name == "top_k_indices" else 0)).all()


def test_greedy_is_the_packages_own_and_the_fields_are_dense(params):
    sampler, own = samplers(params)
    got, want = (s.sample(PROMPTS, max_new_tokens=12, return_state=True) for s in (sampler, own))
    assert got.text == want.text
    np.testing.assert_array_equal(got.state.predicted_tokens, want.state.predicted_tokens)
    assert len(set(np.asarray(got.tokens[0, :12]).tolist())) > 3
    assert isinstance(got.state, _sampler_loop.SamplingState)
    for row, prompt in enumerate(PROMPTS):
        check(params, prompt, got.state, row, 12)
    for name, x in vars(want.state).items():  # nothing of gemma's own is another
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-5, 1e-5), *(
            jax.tree.map(lambda x: x if x.dtype != want.state.rng.dtype else jnp.zeros(()), y)
            for y in (getattr(got.state, name), x)
        ))  # fmt: skip


def test_one_step_assigns_the_new_fields(params):
    """What the widely copied change verifies with mocks: the state has the fields, a step fills its place alone."""
    names = {f.name for f in dataclasses.fields(ours.SamplingState)}
    assert names >= {"predicted_top_k_values", "predicted_top_k_indices"}
    sampler, _ = samplers(params)
    (state,) = list(sampler.sample(PROMPTS[0], stream=True, max_new_tokens=1, return_state=True))
    assert state.state.predicted_top_k_values.shape == state.state.predicted_top_k_indices.shape == (1, 16, 10)
    check(params, PROMPTS[0], state.state, 0, 1)


def test_a_sequence_that_ends_is_blank_afterwards(params):
    sampler, own = samplers(params)
    first = sampler.sample(PROMPTS, max_new_tokens=8, return_state=True)
    stop = int(first.tokens[0, 3])
    steps = np.asarray(first.tokens[0]).tolist().index(stop) + 1
    sampler, own = samplers(params, stop_tokens=(stop,), keep=3)
    got, want = (s.sample(PROMPTS, max_new_tokens=8, return_state=True) for s in (sampler, own))
    np.testing.assert_array_equal(got.tokens, want.tokens)
    check(params, PROMPTS[0], got.state, 0, steps, keep=3)


@pytest.mark.parametrize(
    "sampling", [gm.text.RandomSampling(temperature=0.7), gm.text.TopkSampling(k=4), gm.text.TopPSampling(p=0.8)]
)
def test_sampling_methods(params, sampling):
    """Every token is one that the method keeps, and follows from the sequence's own noise alone."""
    sampler, _ = samplers(params)
    options = {"max_new_tokens": 6, "return_state": True, "sampling": sampling, "rng": 5}
    batch, alone = sampler.sample(PROMPTS, **options), sampler.sample(PROMPTS[0], **options)
    np.testing.assert_array_equal(batch.tokens[0], alone.tokens)
    seeded = sampler.sample(PROMPTS, **options, seeds=[4_000_000_000, 7])
    turned = sampler.sample(PROMPTS[::-1], **options, seeds=[7, 4_000_000_000])
    np.testing.assert_array_equal(turned.tokens[::-1], seeded.tokens)
    np.testing.assert_array_equal(sampler.sample(PROMPTS[1], **options, seeds=7).tokens, seeded.tokens[1])
    assert not np.array_equal(seeded.tokens[1], batch.tokens[1])
    other = sampler.sample(PROMPTS[0], **options | {"rng": 6})
    assert not np.array_equal(other.tokens, alone.tokens)
    check(params, PROMPTS[1], batch.state, 1, 6)
    z = dense(params, PROMPTS[1], np.asarray(batch.tokens[1, :6]))
    higher = z > np.asarray(batch.state.predicted_logit)[1, :6, None] + 1e-4
    assert 11 not in np.asarray(batch.tokens)
    if isinstance(sampling, gm.text.TopkSampling):
        assert higher.sum(1).max() < sampling.k
    if isinstance(sampling, gm.text.TopPSampling):
        assert (jax.nn.softmax(z) * higher).sum(1).max() < sampling.p


def test_the_rules_of_each_method():
    for sampling, rules in (
        (gm.text.Greedy(), {"temperature": 0}),
        (gm.text.RandomSampling(temperature=0.7), {"temperature": 0.7}),
        (gm.text.TopkSampling(temperature=0.7, k=4), {"temperature": 0.7, "top_k": 4}),
        (gm.text.TopPSampling(temperature=0.7, p=0.8), {"temperature": 0.7, "top_p": 0.8}),
    ):
        assert ours.rules_of(sampling) == rules


def test_two_turns(params):
    """The state goes on into a second turn, as the package's does."""
    sampler, own = samplers(params)
    turns = []
    for s in (sampler, own):
        first = s.sample(PROMPTS[0], max_new_tokens=3, return_state=True)
        second = s.sample("My name", max_new_tokens=3, last_state=first.state, return_state=True)
        turns.append(np.asarray(second.tokens))
    np.testing.assert_array_equal(*turns)


def lowered(params, length, **options):
    sampler, _ = samplers(params, max_out_length=length, **options)
    inputs = sampler._get_inputs(prompt=PROMPTS, images=None, add_bos=True, has_batch_dim=True, sharding=None)
    state = _prefill.prefill(
        model=MODEL, params=params, input=inputs, last_state=None, cache_length=64, pad_length=8,
        rng=jax.random.key(0), sharding=None, max_out_length=length,
    )  # fmt: skip
    state = ours.SamplingState.of(state, sampler.keep)
    loop = sampler._loop(gm.text.Greedy())
    run = type(loop)._sample_loop
    compiled = run.lower(loop, params=params, state=state, max_new_tokens=jnp.asarray(4)).compile()
    return compiled.memory_analysis(), sum(x.nbytes for x in jax.tree.leaves(state))


def test_memory_is_the_record_and_the_state_is_donated(params):
    """Nothing of the size batch · length · vocabulary; what 512 more steps take is 12 + 8·k bytes each, and a token."""
    (small, _), (large, state) = lowered(params, 512), lowered(params, 1024)
    assert large.temp_size_in_bytes < 2 * 1024 * V  # a quarter of fp32 logits
    assert large.output_size_in_bytes - small.output_size_in_bytes == 2 * 512 * (12 + 8 * 10 + 4)
    assert large.temp_size_in_bytes - small.temp_size_in_bytes <= 2 * 512 * (12 + 8 * 10 + 4)
    assert large.alias_size_in_bytes >= 0.9 * state


def test_donation_takes_nothing_of_the_callers(params):
    sampler, _ = samplers(params)
    key = jax.random.key(3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # "some donated buffers were not usable" among them
        first = sampler.sample(PROMPTS[0], max_new_tokens=2, rng=key, return_state=True)
        again = sampler.sample(PROMPTS[0], max_new_tokens=2, rng=key, return_state=True)
        sampler.sample("My name", max_new_tokens=2, last_state=first.state)
    np.testing.assert_array_equal(first.tokens, again.tokens)
    assert float(first.state.predicted_logsumexp[0, 0]) == float(again.state.predicted_logsumexp[0, 0])


def test_a_model_that_has_diverged(params):
    sampler, _ = samplers(jax.tree.map(lambda x: x * jnp.nan, params))
    with pytest.raises(NotFiniteError, match="the model has diverged"):
        sampler.sample(PROMPTS, max_new_tokens=2)


def test_errors(params):
    class Own(gm.text.SamplingMethod):
        def get_next_tokens(self, logits, rng):
            return logits.argmax(-1)

    class OwnGreedy(gm.text.Greedy):
        def get_next_tokens(self, logits, rng):
            return logits.argmin(-1)

    sampler, _ = samplers(params)
    for words, call in (
        ("Greedy, RandomSampling", lambda: sampler.sample(PROMPTS, sampling=Own())),
        ("Greedy, RandomSampling", lambda: sampler.sample(PROMPTS, sampling=OwnGreedy())),
        ("1..16", lambda: sampler.sample(PROMPTS, max_new_tokens=17)),
        ("one prompt", lambda: sampler.sample(PROMPTS, stream=True)),
        ("seeds: expected 2 whole", lambda: sampler.sample(PROMPTS, seeds=[1])),
        ("seeds: .*4294967295", lambda: sampler.sample(PROMPTS, seeds=[1, 2**32])),
        ("keep: .*0..700", lambda: samplers(params, keep=701)[0].sample(PROMPTS)),
    ):
        with pytest.raises(OptionError, match=words):
            call()


def test_another_gemma_is_an_error_that_names_versions(monkeypatch):
    monkeypatch.setattr(_prefill, "prefill", lambda *, model, top_k_logits: None)
    with pytest.raises(ConfigError, match=r"gemma 3\.3\.\d: prefill takes \(model, top_k_logits\), expected \(model, "):
        importlib.reload(ours)
    monkeypatch.setitem(sys.modules, "gemma.gm.text._prefill", None)
    monkeypatch.delattr(gm.text, "_prefill")
    with pytest.raises(ConfigError, match=r": gemma\.gm\.text\._prefill:prefill is gone; install 'gemma>"):
        importlib.reload(ours)
