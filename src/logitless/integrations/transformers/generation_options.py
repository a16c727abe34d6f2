"""What `model.generate`'s options amount to without logits, and one line for those that have no meaning."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
import transformers
from torch import Tensor

from ...algebra.options import whole
from ...algebra.rules import TEMPERATURES, Order, is_temperature
from ...errors import OptionError, ShapeError
from ...models.positions import reach
from ...sample.rules import Rules
from ..seam import Seam

WARPERS = {
    transformers.TemperatureLogitsWarper: "temperature",
    transformers.TopKLogitsWarper: "top_k",
    transformers.TopPLogitsWarper: "top_p",
    transformers.MinPLogitsWarper: "min_p",
}
MODES = ("greedy_search", "sample")
ROWS = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")  # of each step, which none keeps
Processors = Callable[[Tensor, Tensor], Tensor]  # (ids (B, P), logits (B, V)) -> logits


def plan_of(model: Any, logits_processor: Any, config: Any, order: Order) -> tuple[Rules, float, Processors | None]:
    """(rules, temperature, what changes whole rows first) that transformers' prepared processors amount to.

    The rules are the list's end, as far as it is one of each of WARPERS in their order, which `order` then changes.
    Raises OptionError.
    """
    mode = config.get_generation_mode().value
    if mode not in MODES or model.config.is_encoder_decoder:
        got = mode if mode not in MODES else "an encoder-decoder"
        raise OptionError(
            f"generate: expected {' or '.join(MODES)} of a decoder-only model, got {got}; use model.generate for it"
        )
    names = [_warper(p) for p in logits_processor]
    start = next(i for i in range(len(names) + 1) if names[i:] == [n for n in WARPERS.values() if n in names[i:]])
    own = {n: getattr(p, n) for p, n in zip(logits_processor[start:], names[start:], strict=True) if n}
    temperature = own.pop("temperature", 1.0) if config.do_sample else 0.0
    before = transformers.LogitsProcessorList(logits_processor[:start])
    if order != "transformers" and any(type(p) in WARPERS for p in before):
        last = type(logits_processor[-1]).__name__
        raise OptionError(
            f"order: expected {', '.join(WARPERS.values())} after all other processors, got {last} last, which keeps "
            f"them in transformers' order; leave it out, or pass order='transformers', got {order!r}"
        )

    def change(ids: Tensor, z: Tensor) -> Tensor:
        return cast(Any, before)(ids.to(z.device), z)

    return Rules(**own, order=order) if config.do_sample else Rules(), temperature, change if before else None


def _warper(processor: Any) -> str | None:
    """The option of `sample_tokens` that a processor amounts to, None where it does something of its own."""
    plain = getattr(processor, "filter_value", -math.inf) == -math.inf
    one = getattr(processor, "min_tokens_to_keep", 1) == 1
    return WARPERS.get(type(processor)) if plain and one else None


def padding(stopping_criteria: Any, config: Any) -> int | None:
    """What a sequence that has ended goes on with; None where none ends before all, as in transformers' own loop."""
    if not any(hasattr(criterion, "eos_token_id") for criterion in stopping_criteria):
        return None
    if config.pad_token_id is not None:
        return int(config.pad_token_id)
    return int(torch.as_tensor(config.eos_token_id).flatten()[0])


def ranks_in_step(model: Any, synced_gpus: bool | None) -> bool:
    """Whether ranks go on until all of them have ended.

    None: as transformers has it, where it knows that parameters are split over them.
    """
    return model._extract_generation_mode_kwargs(None, {}, synced_gpus, None, None)["synced_gpus"]


def check_prompts(inner: Any, inputs: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    """Raises ShapeError, OptionError for what would fail later and in words of transformers'."""
    ids, mask = inputs.get("input_ids"), inputs.get("attention_mask")
    if isinstance(ids, Tensor) and ids.dim() == 1:
        raise ShapeError(f"inputs: expected input_ids (B, P), got shape {tuple(ids.shape)}; pass input_ids[None]")
    if not isinstance(ids, Tensor) or ids.dim() != 2:
        return
    lengths = _lengths(ids, mask)
    if ids.numel() == 0 or int(lengths.min()) == 0:
        raise ShapeError(
            f"inputs: expected prompts of at least one token, got an empty one in input_ids of shape {tuple(ids.shape)}"
        )
    context, longest = reach(inner.config), int(lengths.max())
    if context is not None and longest >= context:
        raise ShapeError(
            f"inputs: expected prompts of less than {context:,} tokens, the context of {type(inner).__name__}, got "
            f"{longest:,}; cut them"
        )
    rows = len(ids) * (options.get("num_return_sequences") or 1)
    if rows > 1 and isinstance(options.get("streamer"), transformers.TextStreamer):
        raise OptionError(f"streamer: a TextStreamer takes one sequence, got {rows}; use on_step, or go one by one")


def check_room(model: Any, ids: Tensor, mask: Any, new: int) -> None:
    """Raises ShapeError where a prompt and its `new` tokens could go past the context, OptionError for 2.5 tokens."""
    if whole(new) is None:
        raise OptionError(f"generate: expected a whole number of new tokens by max_new_tokens or max_length, got {new}")
    context, longest = reach(model.config), int(_lengths(ids, mask).max())
    if context is not None and longest + new > context:
        raise ShapeError(
            f"generate: {longest:,} prompt tokens and {new:,} new ones go past the context of {type(model).__name__}, "
            f"{context:,} tokens; pass max_new_tokens of at most {context - longest:,}, or cut the prompts"
        )


def _lengths(ids: Tensor, mask: Any) -> Tensor:
    """The tokens of each prompt, padding left out."""
    padded = isinstance(mask, Tensor) and mask.shape == ids.shape
    return mask.sum(1) if padded else ids.new_tensor([ids.shape[1]])


def check_rules(options: Mapping[str, Any], order: Order) -> None:
    """Raises OptionError for what transformers would refuse in words of its own."""
    config = options.get("generation_config")
    names = ("temperature", "top_k", "top_p", "min_p")
    given = {name: options.get(name, getattr(config, name, None)) for name in names}
    given = {name: value for name, value in given.items() if value is not None}
    temperature = given.pop("temperature", 1.0)
    Rules(**given, order=order)
    if options.get("do_sample", getattr(config, "do_sample", False)) and not is_temperature(temperature):
        raise OptionError(
            f"temperature: expected a number in {TEMPERATURES}, got {temperature!r}; do_sample=False is greedy"
        )


def check_supported(options: Mapping[str, Any]) -> None:
    """Raises OptionError for what a loop of one's own cannot do, and for what it would not return."""
    for name in ("assistant_model", "custom_generate", "token_healing"):
        if options.get(name):
            raise OptionError(f"generate: expected no {name}, which is not supported; use model.generate for it")
    for name in ROWS:
        if options.get(name, getattr(options.get("generation_config"), name, None)):
            raise OptionError(
                f"generate: expected no {name}, which is not kept: the record has each token's log-prob, rank, entropy "
                "and best entries (keep=...); use model.generate for it"
            )


def with_stop_strings(options: dict[str, Any], default: Any) -> dict[str, Any]:
    """The options with stop strings as a criterion: where there is a loop of one's own, transformers uses no tokenizer.

    They are those of the call, else of its generation_config, else of the model's, the `default`.
    """
    configs = (options.get("generation_config"), default)
    found = [strings for config in configs if (strings := getattr(config, "stop_strings", None)) is not None]
    options = dict(options)
    strings, tokenizer = options.get("stop_strings", next(iter(found), None)), options.pop("tokenizer", None)
    if strings is None:
        return options
    if tokenizer is None:
        raise OptionError("stop_strings: expected a tokenizer with them, got none; pass tokenizer=...")
    criteria = [*(options.get("stopping_criteria") or []), transformers.StopStringCriteria(tokenizer, strings)]
    return {**options, "stop_strings": None, "stopping_criteria": transformers.StoppingCriteriaList(criteria)}


HOST = Seam("transformers", ">=5.6,<6", {})
METHODS = {  # the model's own, and what they are called with
    "_prefill": ("input_ids", "generation_config", "model_kwargs"),
    "_update_model_kwargs_for_generation": ("outputs", "model_kwargs"),
    "_has_unfinished_sequences": ("this_peer_finished", "synced_gpus", "device"),
    "_extract_generation_mode_kwargs": ("custom_generate", "kwargs", "synced_gpus", "assistant_model", "streamer"),
}


def require(model: Any) -> None:
    """Raises ConfigError that names what the installed transformers no longer takes as it is called here."""
    changed = [line for name in METHODS if (line := moved(model, name))]
    if changed:
        raise HOST.error("; ".join(changed))


def moved(model: Any, name: str) -> str:
    """What is no longer as expected about one method, '' where nothing is."""
    method, given = getattr(model, name, None), METHODS[name]
    if method is None:
        return f"GenerationMixin.{name} is gone"
    signature = inspect.signature(method)
    try:
        bound = signature.bind(*given).arguments
    except TypeError:
        bound = {}
    if tuple(bound) == given:
        return ""
    return f"GenerationMixin.{name} takes ({', '.join(signature.parameters)}), expected ({', '.join(given)}, ...)"
