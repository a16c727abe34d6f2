"""transformers' DiffusionGemma without logits: a denoising step's sample, best entries, entropies and mean embeddings.

    logitless.integrations.diffusion_gemma.install(model)
    model.generate(...)

Of the logits of a canvas (B, 256, 262144) the step needs one draw, the argmax, the entropy, and for the next step the
mean embedding under their softmax: `relax.expected_embedding` has them in one pass.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ConfigError
from ..relax import Noise, expected_embedding
from ..vocab.face import LMHead
from .seam import Seam

MODULE = "transformers.models.diffusion_gemma.generation_diffusion_gemma"
MODEL = "transformers.models.diffusion_gemma.modeling_diffusion_gemma"
HOST = Seam(
    "transformers",
    ">=5.23,<5.25",
    {
        f"{MODEL}:DiffusionGemmaForBlockDiffusion.forward": (),
        f"{MODULE}:DiffusionGemmaGenerationMixin._denoising_step": (
            "self", "decoder_forward", "current_canvas", "argmax_canvas", "input_ids", "decoder_position_ids",
            "self_conditioning_logits", "mask_mapping", "past_key_values|cache", "finished_denoising", "cur_step",
            "sampler", "logits_processor", "diffusion_stopping_criteria", "model_kwargs",
        ),
        f"{MODULE}:EntropyBoundSampler.accept_canvas": (
            "self", "current_canvas", "denoiser_canvas", "logits", "cur_step",
        ),
        f"{MODULE}:StableAndConfidentStoppingCriteria.__call__": ("self", "argmax_canvas", "logits", "kwargs"),
        f"{MODULE}:LinearTemperatureScheduleLogitsProcessor.__call__": ("self", "input_ids", "scores", "cur_step"),
    },
)  # fmt: skip


class MeanEmbedding(Tensor):
    """Mean embeddings (B, T, D) in the place of the logits (B, T, V) that a model would take them of.

    softmax(...).to(...) is itself, and its product with the table the embeddings; whatever else is asked of logits is a
    ConfigError.
    """

    @classmethod
    def of(cls, embedding: Tensor) -> MeanEmbedding:
        return embedding.as_subclass(cls)

    def plain(self) -> Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(Tensor)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.softmax, Tensor.to):
            return args[0]
        if func is torch.matmul and isinstance(args[0], MeanEmbedding):
            return args[0].plain()
        if func is Tensor.__repr__:
            return f"MeanEmbedding({args[0].plain()!r})"
        if func is Tensor.cpu:  # by `generate` itself, for a streamer of drafts
            raise ConfigError("streamer: expected one that takes token ids, got one that takes logits; leave it out")
        name = getattr(func, "__name__", func)
        raise HOST.error(f"its model asks {name} of self-conditioning logits, expected their softmax times the table")


def install(model: nn.Module, *, memory_budget: int | None = None) -> None:
    """Makes a DiffusionGemma model denoise without logits, in place; `generate` and its arguments stay as they are.

    Dense equivalent: the model's own step, with `torch.multinomial` drawing by `relax.Noise` seeded from torch's own
    generator: the same tokens. The entropy bound sampler, the stable and confident criterion and the linear temperature
    schedule are known; others, logits processors among them, are a ConfigError. The step itself is never compiled.
    memory_budget: bytes of slices, 256 MiB unless given, up to 1 GiB on a GPU. Memory: slices and (B, T, D) numbers;
    the model's own has four (B, T, V) fp32 tensors. Forward calls outside of `generate` have their logits.
    """
    HOST.require()
    kind = "DiffusionGemmaForBlockDiffusion"
    if kind not in (c.__name__ for c in type(model).__mro__):
        raise ConfigError(f"model: expected transformers' {kind}, got {type(model).__name__}")

    def step(self: Any, decoder_forward: Any, **given: Any) -> Any:  # a forward with logits, in whose place is the body
        return denoising_step(self, memory_budget=memory_budget, **given)

    model._denoising_step = MethodType(step, model)  # pyright: ignore[reportArgumentType]


def uninstall(model: Any) -> None:
    """Gives the model its own denoising step back."""
    model.__dict__.pop("_denoising_step", None)


@torch.no_grad()
def denoising_step(
    model: Any,
    current_canvas: Tensor,  # (B, T)
    argmax_canvas: Tensor,  # (B, T)
    input_ids: Tensor,
    decoder_position_ids: Tensor,
    self_conditioning_logits: Any,  # MeanEmbedding (B, T, D), None at first
    mask_mapping: Any,
    finished_denoising: Tensor,  # (B,)
    cur_step: int,
    sampler: Any,
    logits_processor: Any,
    diffusion_stopping_criteria: Any,
    *,
    memory_budget: int | None,
    **model_kwargs: Any,  # the keys and values among them, by the model's name for them
) -> tuple[Tensor, Tensor, MeanEmbedding, Tensor]:
    """The model's own `_denoising_step`, which this follows, from hidden states."""
    _check("sampler", sampler, "EntropyBoundSampler")
    outputs = model.model(
        decoder_input_ids=current_canvas,
        self_conditioning_logits=self_conditioning_logits,
        decoder_attention_mask=mask_mapping,
        decoder_position_ids=decoder_position_ids,
        **model_kwargs,
    )
    found = expected_embedding(
        outputs.last_hidden_state,
        LMHead.of(model),
        model.model.decoder.embed_tokens.weight,
        temperature=temperature_of(logits_processor, cur_step),
        noise=Noise.draw(tuple(current_canvas.shape), current_canvas.device),
        memory_budget=memory_budget,
    )
    assert found.token is not None  # it was given noise
    accepted = accept(sampler, current_canvas, found.token, found.entropy)
    # the class's own: beside a static cache an instance has a compiled one, which reads the mask of the first sampler
    canvas = type(sampler).renoise_canvas(sampler, accepted, cur_step)
    argmax, embedding = found.argmax, found.embedding
    if diffusion_stopping_criteria is not None:
        if finished_denoising.any():
            argmax = torch.where(finished_denoising[:, None], argmax_canvas, argmax)
            canvas = torch.where(finished_denoising[:, None], current_canvas, canvas)
            embedding = torch.where(finished_denoising[:, None, None], self_conditioning_logits.plain(), embedding)
        finished_denoising |= stops(diffusion_stopping_criteria, argmax, found.entropy)
    return canvas, argmax, MeanEmbedding.of(embedding), finished_denoising


def temperature_of(processors: Any, cur_step: int) -> float:
    """What the logits processors, none or the linear schedule, divide logits by at a step."""
    if not len(processors):
        return 1.0
    _check("logits_processor", processors[0], "LinearTemperatureScheduleLogitsProcessor")
    if len(processors) > 1:
        raise ConfigError(f"logits_processor: expected a schedule of temperature alone, got {len(processors)}")
    scores = torch.ones((), dtype=torch.float64)
    return 1 / processors[0](None, scores, cur_step=cur_step).item()


def accept(sampler: Any, canvas: Tensor, drawn: Tensor, entropy: Tensor) -> Tensor:
    """`EntropyBoundSampler.accept_canvas` from the entropies: the surest tokens whose entropies keep to the bound."""
    ordered, order = torch.sort(entropy, dim=-1)
    within = ordered.cumsum(-1) - ordered <= sampler.entropy_bound
    sampler.accepted_token_mask = torch.zeros_like(within).scatter(-1, order, within)
    return torch.where(sampler.accepted_token_mask, drawn, canvas)


def stops(criteria: Any, argmax: Tensor, entropy: Tensor) -> Tensor:
    """`StableAndConfidentStoppingCriteria` from the entropies, (B,)."""
    _check("stopping criteria", criteria, "StableAndConfidentStoppingCriteria")
    confident = entropy.mean(-1) < criteria.confidence_threshold
    if criteria.stability_threshold == 0:
        return confident
    if criteria.argmax_canvas_history is None:
        criteria.argmax_canvas_history = argmax.new_full((criteria.stability_threshold, *argmax.shape), -1)
    stable = (criteria.argmax_canvas_history == argmax[None]).all(-1).all(0)
    criteria.argmax_canvas_history = torch.cat([criteria.argmax_canvas_history[1:], argmax[None]])
    return stable & confident


def _check(name: str, x: Any, kind: str) -> None:
    if type(x).__name__ != kind:
        raise ConfigError(f"{name}: expected {kind}, got {type(x).__name__}; leave it out, or uninstall")
