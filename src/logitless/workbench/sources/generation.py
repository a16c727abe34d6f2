"""What a model generates from: prompts as a batch, and its generation_config.json, checked, or left out by a run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ...errors import ConfigError, in_one_line
from .tokenizer import TextTokenizer

if TYPE_CHECKING:
    import torch
    from torch import Tensor

TOKENS = ("eos_token_id", "bos_token_id", "pad_token_id")
OTHER_WAYS = (  # to generate than one token after the other, each drawn from its own distribution
    "prompt_lookup_num_tokens", "assistant_early_exit", "use_mtp", "dola_layers", "force_words_ids", "constraints",
)  # fmt: skip


def left_padded(prompts: list[list[int]], pad: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """(ids, attention mask) of prompts, (B, T) each: completions begin at one place, behind the longest."""
    import torch
    from torch.nn.utils.rnn import pad_sequence

    ids = [torch.tensor(prompt, dtype=torch.long) for prompt in prompts]
    left: dict[str, Any] = {"batch_first": True, "padding_side": "left"}
    mask = pad_sequence([torch.ones_like(row) for row in ids], **left)
    return pad_sequence(ids, padding_value=pad, **left).to(device), mask.to(device)


def align_tokens(model: Any, tokenizer: TextTokenizer) -> None:
    """The model's end and padding ids as its tokenizer has them, so that generation stops where documents do."""
    saved = tokenizer.saved
    for config in (model.config, model.generation_config):
        config.eos_token_id = tokenizer.eos_id
        config.bos_token_id = saved.bos_token_id
        config.pad_token_id = tokenizer.eos_id if saved.pad_token_id is None else saved.pad_token_id
    _make_valid(model.generation_config)


def check_generation(model: Any, tokenizer: Any, name: str) -> None:
    """ConfigError where transformers can make nothing of what `generate` of this model begins with, or no record."""
    import torch

    from ...integrations.transformers.generation_options import with_stop_strings

    ids = torch.zeros(1, 1, dtype=torch.long, device=model.device)
    alone = {"max_new_tokens": 1, "custom_generate": lambda model, ids, **_: ids}
    try:
        stop = with_stop_strings({"tokenizer": tokenizer}, model.generation_config)
        model.generate(ids, attention_mask=ids + 1, **alone, **stop)
    except Exception as error:  # of each option's own code
        raise ConfigError(f"--model {name}: generation_config.json: {in_one_line(error, 300)}") from None
    for option in OTHER_WAYS:
        if (value := getattr(model.generation_config, option, None)) not in (None, False):
            raise ConfigError(
                f"--model {name}: generation_config.json: {option} asks for another way to generate than token by "
                f"token, got {value!r:.80}; take it out of the file"
            )


@contextmanager
def from_all_entries(model: Any) -> Iterator[None]:
    """Has a model sample from its own distribution: what learns from its completions takes them for that.

    Published models name a nucleus, penalties or forbidden words, which are there again afterwards, to be saved.
    """
    from transformers import GenerationConfig

    config = model.generation_config
    own = dict(vars(config))
    plain = vars(GenerationConfig(**{name: own.get(name) for name in TOKENS}))
    vars(config).clear()
    vars(config).update(plain)
    try:
        yield
    finally:
        vars(config).clear()
        vars(config).update(own)


def _make_valid(generation: Any) -> None:
    """Published models set a temperature and no `do_sample`, which transformers reads but does not save."""
    try:
        generation.validate(strict=True)
    except ValueError:
        generation.do_sample = True
    try:
        generation.validate(strict=True)
    except ValueError as error:
        raise ConfigError(
            f"generation_config.json: expected what transformers can save, got {in_one_line(error, 300)}"
        ) from None
