"""A sampler for the PyPI package `gemma` whose state keeps the best entries of each step in the place of its logits.

Works with gemma 3.3: `Sampler` is `gm.text.Sampler`, its loop's state one that says what each token was drawn from.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import flax  # pyright: ignore[reportMissingImports]
import jax
import jax.numpy as jnp
import numpy as np
from gemma.gm import text as gemma_text  # pyright: ignore[reportMissingImports]
from gemma.gm.text import Sampler as GemmaSampler  # pyright: ignore[reportMissingImports]
from jax import Array

from ..errors import NotFiniteError, OptionError
from ..jax import LMHead, Noise, SampleRecord, sample_tokens
from .seam import Seam

SAMPLER, LOOP = "gemma.gm.text._sampler", "gemma.gm.text._sampler_loop"
HOST = Seam(
    "gemma",
    ">=3.3,<3.4",
    {
        "gemma.gm.text._prefill:prefill": (
            "model", "params", "input", "last_state", "cache_length", "max_out_length", "pad_length", "rng", "sharding",
        ),
        f"{SAMPLER}:Sampler.sample": (
            "self", "prompt", "images", "max_new_tokens", "stream", "sampling", "rng", "return_state", "last_state",
            "sharding",
        ),
        f"{SAMPLER}:Sampler._get_inputs": ("self", "prompt", "images", "add_bos", "has_batch_dim", "sharding"),
        f"{SAMPLER}:Sampler._decode_state": ("self", "state", "predicted_tokens", "has_batch_dim", "return_state"),
        f"{SAMPLER}:Sampler._stream_decode_state": ("self", "state_iter", "return_state"),
        f"{SAMPLER}:_get_has_batch_dim": ("prompt",),
        f"{SAMPLER}:_normalize_rng": ("seed_or_rng",),
        f"{LOOP}:SamplingState": (
            "step", "done", "last_token", "last_token_pos", "predicted_tokens", "cache", "rng", "init_cache_length",
            "full_attention_mask",
        ),
        f"{LOOP}:SamplerLoop": (
            "model", "end_tokens", "forbidden_tokens", "sampling", "cache_length", "special_tokens",
        ),
        f"{LOOP}:SamplerLoop._sample_loop": ("self", "params", "state", "max_new_tokens"),
        f"{LOOP}:SamplerLoop._sample_step": ("self", "state", "params"),
    },
)  # fmt: skip
HOST.require()  # after its public sampler's import, whose errors say which of gemma's dependencies does not fit
from gemma.gm.text import _prefill, _sampler, _sampler_loop  # noqa: E402  # pyright: ignore[reportMissingImports]

KEEP = 10


@flax.struct.dataclass(kw_only=True)
class SamplingState(_sampler_loop.SamplingState):
    """gemma's state with a record of each predicted token: 12 + 8·k bytes, whatever the vocabulary.

    All are of the distribution at temperature 1 over the tokens that are not forbidden, fp32; steps that were never
    taken, and those after a sequence's end, hold 0 and ids of -1. A log-prob is a logit minus the log-sum-exp.
    """

    predicted_top_k_values: Array  # (B, max_out_length, k) best logits first
    predicted_top_k_indices: Array  # (B, max_out_length, k)
    predicted_logsumexp: Array  # (B, max_out_length)
    predicted_logit: Array  # (B, max_out_length) of the predicted token
    predicted_entropy: Array  # (B, max_out_length) in nats
    seeds: Array  # (B,) uint32, which with the key `rng` decides a sequence's noise

    @classmethod
    def of(cls, state: Any, keep: int, seeds: Any = None) -> SamplingState:
        """gemma's state, or this one of an earlier turn, with an empty record. Raises OptionError."""
        shape = state.predicted_tokens.shape
        own = {f.name: getattr(state, f.name) for f in dataclasses.fields(_sampler_loop.SamplingState)}
        return cls(
            **own,
            predicted_top_k_values=jnp.zeros((*shape, keep)),
            predicted_top_k_indices=jnp.full((*shape, keep), -1, jnp.int32),
            predicted_logsumexp=jnp.zeros(shape),
            predicted_logit=jnp.zeros(shape),
            predicted_entropy=jnp.zeros(shape),
            seeds=_seeds(seeds, shape[0]),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplerLoop(_sampler_loop.SamplerLoop):
    """gemma's loop with hidden states to tokens in one streaming pass; its logits are never made."""

    keep: int = KEEP

    @functools.partial(jax.jit, static_argnames=("self",), donate_argnames=("state",))
    def _sample_loop(self, *, params: Any, state: SamplingState, max_new_tokens: Array) -> SamplingState:
        return super()._sample_loop(params=params, state=state, max_new_tokens=max_new_tokens)

    @functools.partial(jax.jit, static_argnames=("self",))
    def _sample_step(self, state: SamplingState, *, params: Any) -> SamplingState:
        out = self.model.apply(
            {"params": params},
            tokens=state.last_token[:, None],
            cache=state.cache,
            positions=state.last_token_pos[:, None],
            attention_mask=state.attention_mask_for_step[:, None, :],
            return_hidden_states=True,
        )
        drawn = sample_tokens(
            out.hidden_states[:, 0],
            head_of(self.model, params),
            _noise(state),
            keep=self.keep,
            forbidden=self.forbidden_tokens or (),
            **rules_of(self.sampling),
        )
        token = jnp.maximum(drawn.token, 0)  # -1 where logits are not finite, which `Sampler` looks for afterwards
        ended = jnp.isin(token, jnp.asarray(self.end_tokens))
        return dataclasses.replace(
            state,
            step=state.step + 1,
            done=state.done | ended,
            last_token=token,
            last_token_pos=state.last_token_pos + ~state.done,
            predicted_tokens=state.predicted_tokens.at[:, state.step].set(token),
            cache=out.cache,
            **_written(state, drawn),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampler(GemmaSampler):
    """`gm.text.Sampler` with the k best entries, log-sum-exp, chosen logit and entropy of each step in its state.

    keep: k. Everything else, and the options of `sample`, is gemma's own; `sample(..., return_state=True).state` is a
    `SamplingState`. Greedy tokens are gemma's. Others follow the same distribution, drawn by noise that depends on
    `rng`, on a sequence's own seed and on the step alone: with `seeds` neither the batch's size nor its order changes a
    sequence; without them its seed is its row, so that its place in the batch does.
    Raises OptionError for a sampling method that is not one of gemma's four, for a keep that is out of range, and for
    seeds that are not one for each sequence; NotFiniteError for a model that has diverged, unless it streams.
    """

    keep: int = KEEP

    def sample(
        self,
        prompt: Any,
        *,
        images: Any = None,
        max_new_tokens: int | None = None,
        stream: bool = False,
        sampling: Any = None,
        rng: Any = None,
        seeds: Any = None,  # (B,), or a number for one prompt
        return_state: bool = False,
        last_state: Any = None,
        sharding: Any = None,
    ) -> Any:
        """As `gm.text.Sampler.sample`: text, or a SamplerOutput with `return_state`; an iterator with `stream`.

        seeds: a number in 0..2³²-1 for each prompt, its row unless given.
        """
        batched = _sampler._get_has_batch_dim(prompt)
        limit = max_new_tokens or self.max_out_length
        if stream and batched:
            raise OptionError("stream: expected one prompt, got a batch; stream them one by one")
        if not 0 < limit <= self.max_out_length:
            raise OptionError(f"max_new_tokens: expected 1..{self.max_out_length} (max_out_length), got {limit}")
        loop = self._loop(sampling or self.sampling)
        inputs = self._get_inputs(
            prompt=prompt, images=images, add_bos=last_state is None, has_batch_dim=batched, sharding=sharding
        )
        state = _prefill.prefill(
            model=self.model,
            params=self.params,
            input=inputs,
            last_state=last_state,
            cache_length=self.cache_length,
            pad_length=self.pad_length,
            rng=jax.random.clone(_sampler._normalize_rng(rng)),
            sharding=sharding,
            max_out_length=self.max_out_length,
        )
        state = loop.sample(
            params=self.params,
            init_state=SamplingState.of(state, self.keep, seeds),
            max_new_tokens=jnp.asarray(limit),
            stream=stream,
        )
        if stream:
            return self._stream_decode_state(state, return_state=return_state)
        return self._decode_state(
            _finite(state), predicted_tokens=state.predicted_tokens, has_batch_dim=batched, return_state=return_state
        )

    def _loop(self, sampling: Any) -> SamplerLoop:
        rules_of(sampling)
        special = self.tokenizer.special_tokens
        return SamplerLoop(
            model=self.model,
            end_tokens=(special.EOS, special.END_OF_TURN, *self._normalized_stop_tokens),
            forbidden_tokens=self._normalized_forbidden_tokens,
            sampling=sampling,
            cache_length=self.cache_length,
            special_tokens=special,
            keep=self.keep,
        )


def _finite(state: SamplingState) -> SamplingState:
    """The state of a model that has not diverged."""
    if not bool(jnp.isfinite(state.predicted_logsumexp).all()):  # on the devices: their array may be of several hosts
        raise NotFiniteError("head: expected finite logits, got NaN or infinity; the model has diverged")
    return state


def head_of(model: Any, params: Any) -> LMHead:
    """The head of a gemma model: its embedding, and its softcap."""
    return LMHead(params["embedder"]["input_embedding"], softcap=model.config.final_logit_softcap)


def rules_of(sampling: Any) -> dict[str, Any]:
    """gemma's sampling method as options of `sample_tokens`."""
    kind = type(sampling)  # a subclass draws in a way of its own
    if kind is gemma_text.Greedy:
        return {"temperature": 0}
    if kind is gemma_text.RandomSampling:
        return {"temperature": sampling.temperature}
    if kind is gemma_text.TopkSampling:
        return {"temperature": sampling.temperature, "top_k": sampling.k}
    if kind is gemma_text.TopPSampling:
        return {"temperature": sampling.temperature, "top_p": sampling.p}
    raise OptionError(
        f"sampling: expected gemma's Greedy, RandomSampling, TopkSampling or TopPSampling, got {sampling!r}"
    )


def _noise(state: SamplingState) -> Noise:
    """64 bits of each sequence's own, from the state's key and its seed, and the step."""
    words_of = jax.vmap(lambda seed: jax.random.bits(jax.random.fold_in(state.rng, seed), (2,), jnp.uint32))
    words = words_of(state.seeds)
    return Noise(words[:, 0], state.step, words[:, 1])


def _seeds(seeds: Any, batch: int) -> Array:
    """A seed for each sequence, or an error that says what is wrong."""
    each = np.arange(batch) if seeds is None else np.atleast_1d(np.asarray(seeds))
    if each.shape != (batch,) or each.dtype.kind not in "iu" or not ((each >= 0) & (each < 2**32)).all():
        raise OptionError(
            f"seeds: expected {batch} whole numbers in 0..{2**32 - 1}, one for each prompt, got {each.tolist()}"
        )
    return jnp.asarray(each.astype(np.uint32))


def _written(state: SamplingState, drawn: SampleRecord) -> dict[str, Array]:
    """The record with this step's numbers, for the sequences that had not ended."""
    parts = {
        "predicted_top_k_values": drawn.topk_logits,
        "predicted_top_k_indices": drawn.topk_ids,
        "predicted_logsumexp": drawn.logsumexp,
        "predicted_logit": drawn.token_logit,
        "predicted_entropy": drawn.entropy,
    }

    def put(into: Array, part: Array) -> Array:
        done = state.done[:, None] if part.ndim == 2 else state.done
        return into.at[:, state.step].set(jnp.where(done, into[:, state.step], part))

    return {name: put(getattr(state, name), part) for name, part in parts.items()}
