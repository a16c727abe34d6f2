"""Generation by transformers' own machinery, with a record of each token in the place of its logits."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from ...algebra.rules import Order
from ...errors import ConfigError, OptionError, ShapeError
from ...sample import Noise, SampleRecord
from ...sample.tokens import draw_tokens
from ...vocab.face import unwrapped
from .generation_options import (
    Processors,
    check_prompts,
    check_room,
    check_rules,
    check_supported,
    padding,
    plan_of,
    ranks_in_step,
    require,
    with_stop_strings,
)
from .inputs import check_by_name
from .lm_head import alone, captured, causal_lm, output_head, replaced, standing_in, through_head

OnStep = Callable[[SampleRecord], None]


@dataclass(frozen=True, eq=False)
class Generated:
    """What was generated: `ids` as transformers returns them, prompt included, and `record` (B, T) of the T new ones.

    Where a sequence had ended the record's tokens are -1, and ids are padding; without an eos_token_id, where something
    else ended it, ids go on as transformers' do.
    """

    ids: Tensor  # (B, P + T) int64
    record: SampleRecord


def generate(
    model: nn.Module,
    inputs: Mapping[str, Any],
    *,
    keep: int = 10,
    seeds: Tensor | None = None,
    memory_budget: int | None = None,
    on_step: OnStep | None = None,
    order: Order = "transformers",
    **options: Any,
) -> Generated:
    """Generate from a transformers model; keep a record of each token's distribution, never its logits.

    Dense equivalent, up to which random numbers come:

        model.generate(**inputs, **options)

    inputs: the prompts by name, as a tokenizer returns them, padded on the left; keep: the best entries that the
    record holds; seeds: (B,) integers, each sequence's own noise, drawn from torch's generator unless given; with
    num_return_sequences one for each of them; on_step: called with the record (B,) of each step as it comes, -1 where a
    sequence had ended; order: of top_k, top_p and min_p, as `sample_tokens`. options: `model.generate`'s own:
    max_new_tokens, do_sample, temperature, top_k, top_p, min_p, eos_token_id, stop_strings with tokenizer,
    stopping_criteria, streamer, synced_gpus, generation_config, and whatever else needs a logits processor
    (repetition_penalty, guidance_scale, logits_processor, ...): these get rows (B, V), of one step at a time, and the
    record's behaviour_logprob is of what they return, its other fields raw.
    Greedy ids are transformers'. Refused by name: all but greedy search and sampling (beams, assistants, prompt lookup,
    contrastive search, DoLa), encoder-decoders, a TextStreamer of several sequences, a step's rows (output_scores,
    output_logits, output_attentions, output_hidden_states); and, before anything is computed, prompts that could grow
    past the model's context, which transformers goes past with a warning.
    Raises ConfigError, OptionError, ShapeError, DtypeError.
    Memory that grows with T: 40 + 8·keep bytes per token, and the cache.
    """
    check_by_name("inputs", inputs)
    inner, whole = causal_lm(model), cast(Any, model)
    check_prompts(inner, inputs, options)
    check_rules(options, order)
    check_supported(options)
    loop = Recorder(keep, seeds, memory_budget, options.get("streamer"), on_step, order, options.get("synced_gpus"))
    ids = whole.generate(**inputs, **with_stop_strings(options, whole.generation_config), custom_generate=loop)
    if loop.record is None:
        raise ConfigError(f"{type(inner).__name__}.generate() never called its decoding loop, expected it to")
    return Generated(ids, loop.record)


class Recorder:
    """The loop that `generate` gives to transformers, for `model.generate(custom_generate=Recorder())`.

    After the call `record` holds what `Generated.record` is; the call returns ids alone, with no scores or other rows
    whatever its output_* options say. keep, seeds, memory_budget, on_step, order as `generate`;
    streamer, synced_gpus: those that `model.generate` gets, which does not hand them on to a loop of one's own.
    """

    def __init__(
        self,
        keep: int = 10,
        seeds: Tensor | None = None,
        memory_budget: int | None = None,
        streamer: Any = None,
        on_step: OnStep | None = None,
        order: Order = "transformers",
        synced_gpus: bool | None = None,
    ) -> None:
        if on_step is not None and not callable(on_step):
            raise OptionError(f"on_step: expected a function of a step's record, got {type(on_step).__name__}")
        self.keep, self.seeds, self.memory_budget = keep, seeds, memory_budget
        self.streamer, self.on_step, self.synced_gpus = streamer, on_step, synced_gpus
        self.order: Order = order
        self.record: SampleRecord | None = None

    @torch.no_grad()
    def __call__(
        self,
        model: Any,
        input_ids: Tensor,  # (B, P)
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        **given: Any,
    ) -> Tensor:
        require(model)
        rules, temperature, change = plan_of(model, logits_processor, generation_config, self.order)
        batch, first = input_ids.shape
        check_room(model, input_ids, given.get("attention_mask"), generation_config.max_length - first)
        seeds = _seeds(self.seeds, batch, input_ids.device)
        alive = torch.ones(batch, dtype=torch.bool, device=input_ids.device)
        pad, outputs = padding(stopping_criteria, generation_config), None
        in_step, ended = ranks_in_step(model, self.synced_gpus), False
        kept = {"keep": self.keep, "memory_budget": self.memory_budget}
        with recorded(model) as forward:
            while model._has_unfinished_sequences(ended, in_step, input_ids.device):
                step = input_ids.shape[1] - first
                own = None if change is None else functools.partial(forward.changed, change, input_ids)
                noise = Noise(seeds, torch.full_like(seeds, step, dtype=torch.int64))
                forward.options = {"rules": rules, "temperature": temperature, "noise": noise, "change": own, **kept}
                if outputs is None:
                    outputs = model._prefill(input_ids, generation_config, given)
                    self.record = _room(forward.drawn, batch, generation_config.max_length - first)
                else:
                    new = 1 if given["use_cache"] else None
                    inputs = model.prepare_inputs_for_generation(input_ids, next_sequence_length=new, **given)
                    outputs = model(**inputs, return_dict=True)
                given = model._update_model_kwargs_for_generation(outputs, given)
                if ended:  # the other ranks' passes take their parameters from this one's, too
                    continue
                token = forward.drawn.token.long().to(input_ids.device)
                token = token if pad is None else torch.where(alive, token, pad)
                input_ids = torch.cat([input_ids, token[:, None]], 1)
                with forward.left():  # the callbacks may call the model
                    self._write(forward.drawn, alive, step)
                    if self.streamer is not None:
                        self.streamer.put(token.cpu())
                    alive = alive & ~stopping_criteria(input_ids, None)
                    ended = not bool(alive.any())
        if self.streamer is not None:
            self.streamer.end()
        if self.record is not None:
            self.record = self.record[:, : input_ids.shape[1] - first].map(Tensor.clone)
        return input_ids

    def _write(self, drawn: SampleRecord, alive: Tensor, step: int) -> None:
        if self.record is None:
            return
        if bool(alive.all()):
            self.record.write((slice(None), step), drawn)
        else:
            rows = alive.nonzero().squeeze(1).to(drawn.token.device)
            self.record.write((rows, step), drawn[rows])
        if self.on_step is not None:
            self.on_step(self.record[:, step])


class Recorded:
    """A model's forward that draws a token in the place of logits."""

    def __init__(self, model: Any) -> None:
        self.model, self.dense = model, model.forward
        self.head = unwrapped(output_head(model))
        self.dense_head = self.head.forward
        self.options: dict[str, Any] = {}
        self.drawn: SampleRecord

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with captured(self.model, self.dense, *args, **kwargs) as (hidden, outputs):
            self.drawn = through_head(self.model, lambda head, h: draw_tokens(h, head, **self.options), hidden[:, -1])
        return outputs

    def changed(self, change: Processors, ids: Tensor, z: Tensor) -> Tensor:
        """`change(ids, z)`: guidance calls the model for logits of its own."""
        with self.left():
            return change(ids, z)

    @contextmanager
    def left(self) -> Iterator[None]:
        """While it lasts, the model is as it is elsewhere."""
        with replaced(self.model, "forward", self.dense), replaced(self.head, "forward", self.dense_head):
            yield


@contextmanager
def recorded(model: Any) -> Iterator[Recorded]:
    """While it lasts, the model's forward is a `Recorded` one, within the hooks of its call."""
    with alone(model):
        state = Recorded(model)

        @functools.wraps(state.dense)  # transformers reads its signature
        def forward(*args: Any, **kwargs: Any) -> Any:
            return state(*args, **kwargs)

        with standing_in(model, forward):
            yield state


def _room(like: SampleRecord, batch: int, steps: int) -> SampleRecord:
    """A record for `steps` tokens of each sequence."""
    dtype, device = like.logsumexp.dtype, like.token.device
    empty = SampleRecord.empty((batch, steps), keep=like.keep, vocab_size=like.vocab_size, dtype=dtype, device=device)
    return replace(empty, processed=like.processed)


def _seeds(seeds: Tensor | None, batch: int, device: torch.device) -> Tensor:
    if seeds is None:
        return Noise.draw((batch,), device).seeds
    if not isinstance(seeds, Tensor) or tuple(seeds.shape) != (batch,):
        got = tuple(seeds.shape) if isinstance(seeds, Tensor) else type(seeds).__name__
        raise ShapeError(f"seeds: expected a tensor ({batch},), one for each sequence that is generated, got {got}")
    return seeds.to(device)
