"""What rewards soft tokens: a classifier that reads them, or a rule of each entry."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from ...errors import ConfigError, NotFiniteError, OptionError
from ...integrations.transformers.soft_tokens import table_of
from ...relax import SoftTokens
from ...relax.tokens import rows_in
from ...vocab.face import unwrapped
from ..common.functions import is_finite


@dataclass(frozen=True, eq=False)
class Reward:
    """What reads soft tokens through rows of its own table, and gives each sequence a number."""

    table: Tensor  # (V, E)

    def __call__(self, soft: SoftTokens, alive: Tensor) -> Tensor:
        """(B,) fp32 of soft tokens (B, T), up to the end of each. Raises NotFiniteError."""
        return self.of_rows(rows_in(soft, self.table), alive)

    def of_ids(self, ids: Tensor, alive: Tensor) -> Tensor:
        """The same for plain tokens (B, T)."""
        return self.of_rows(self.table[ids], alive)

    def of_rows(self, rows: Tensor, alive: Tensor) -> Tensor:
        """The same for rows of the table, or mixtures of them (B, T, E)."""
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class TokenReward(Reward):
    """A rule that gives a number for each vocabulary entry: its mean over a sequence's tokens.

    Dense equivalent: `(weights @ table)[..., 0].mean(-1)`. The table has one column.
    """

    @classmethod
    def of(cls, rule: Callable[[str], float], name: str, tokenizer: Any, vocab_size: int, device: Any) -> TokenReward:
        """rule: of one entry's text, as the tokenizer decodes it alone. Raises OptionError, NotFiniteError."""
        values = [rule(tokenizer.decode([i])) for i in range(vocab_size)]
        for i, value in enumerate(values):
            if not (isinstance(value, Real) and is_finite(value)):
                error = NotFiniteError if isinstance(value, Real) else OptionError
                raise error(
                    f"--token-reward {name}: expected a finite number in float32 for every token, got {value!r} for "
                    f"{tokenizer.decode([i])!r}"
                )
        return cls(torch.tensor(values, dtype=torch.float32, device=device)[:, None])

    def of_rows(self, rows: Tensor, alive: Tensor) -> Tensor:
        value = (rows[..., 0].float() * alive).sum(-1) / alive.sum(-1).clamp(min=1)
        return _finite(value, "the token reward's sums are not finite in float32: have it give smaller numbers")


@dataclass(frozen=True, eq=False)
class SoftReward(Reward):
    """A frozen sequence classifier that reads soft tokens: the probability of its label `label`, in 0..1.

    Dense equivalent: `classifier(inputs_embeds=weights @ table).logits.softmax(-1)[:, label]`; of one label, sigmoid.
    """

    model: Any  # transformers' ...ForSequenceClassification, of the policy's vocabulary
    label: int

    @classmethod
    def of(cls, model: Any, vocab_size: int, label: int | None) -> SoftReward:
        """label: None for 1, or 0 of a model with one. Raises ConfigError for a label that the model does not have."""
        model.requires_grad_(False).eval()
        last = model.config.num_labels - 1
        if label is None:
            label = min(1, last)
        if not 0 <= label <= last:
            raise ConfigError(f"--reward-label {label}: the reward model has labels 0..{last}: give one of them")
        return cls(table_of(model, vocab_size), model, label)

    def of_rows(self, rows: Tensor, alive: Tensor) -> Tensor:
        logits = self._logits(rows, alive.long()).float()
        value = logits[:, 0].sigmoid() if logits.shape[1] == 1 else logits.softmax(-1)[:, self.label]
        return _finite(value, "the reward model returned NaN or infinity: check its weights, and its dtype")

    def _logits(self, rows: Tensor, mask: Tensor) -> Tensor:
        """transformers pools decoders at the last position when it is given embeddings, so padding comes first here."""
        if not hasattr(self.model, "score"):
            return self.model(inputs_embeds=rows, attention_mask=mask).logits
        shift = mask.shape[1] - mask.sum(-1, keepdim=True)
        order = (torch.arange(mask.shape[1], device=mask.device) - shift) % mask.shape[1]
        rows, mask = rows.gather(1, order[..., None].expand_as(rows)), mask.gather(1, order)
        body = getattr(self.model, self.model.base_model_prefix)
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        hidden = body(inputs_embeds=rows, attention_mask=mask, position_ids=positions, use_cache=False)
        return self.model.score(hidden.last_hidden_state[:, -1])


def _finite(rewards: Tensor, otherwise: str) -> Tensor:
    """The rewards themselves. Raises NotFiniteError that says what they are `otherwise`."""
    if not bool(rewards.isfinite().all()):
        raise NotFiniteError(otherwise)
    return rewards


def shared_vocabulary(policy: Any, reward: Any, tokenizer: Any, reward_tokenizer: Any) -> int:
    """How many entries both models have, padding left out. Raises ConfigError unless their tokenizers are one."""
    if tokenizer.get_vocab() != reward_tokenizer.get_vocab():
        ours, theirs = len(tokenizer.get_vocab()), len(reward_tokenizer.get_vocab())
        raise ConfigError(
            f"the reward model's tokenizer differs from the policy's ({theirs:,} entries against {ours:,}): soft "
            "tokens need one vocabulary; train the reward model with the policy's tokenizer"
        )
    rows = [model.get_input_embeddings().weight.shape[0] for model in (policy, reward)]
    highest = max(tokenizer.get_vocab().values())
    if min(rows) <= highest:
        raise ConfigError(f"expected embeddings of {highest + 1:,} rows or more, got policy and reward model of {rows}")
    return min(highest + 1, unwrapped(policy).config.get_text_config().vocab_size)  # type: ignore[union-attr]


def finite_norm(norm: float) -> float:
    """The norm itself. Raises NotFiniteError for one that no clipping mends."""
    if math.isfinite(norm):
        return norm
    raise NotFiniteError(
        "the policy's gradient is NaN or infinite: lower --learning-rate; through soft tokens also use --method ste, a "
        "higher --tau-end or fewer --completion-length"
    )
