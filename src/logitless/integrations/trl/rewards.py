"""Self-certainty as a reward of TRL's GRPO and RLOO trainers (Intuitor), without the policy's logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ...algebra.rules import TEMPERATURES, is_temperature
from ...errors import ConfigError, NotFiniteError, OptionError
from ...vocab.face import LMHead, token_stats
from ..transformers.lm_head import causal_lm, evaluating, forward_with, through_head
from .completions import Ids, Row, batch_of, check_rows, rows_of


class SelfCertaintyReward:
    """Mean self-certainty of each completion's tokens under the live policy: an entry of TRL's `reward_funcs`.

        reward = SelfCertaintyReward()
        trainer = GRPOTrainer(model, reward_funcs=[reward], ...)
        reward.bind(trainer)

    Dense equivalent, for one completion behind its prompt, each token scored by the position before it:

        z = model(prompt_ids + completion_ids).logits[len(prompt_ids) - 1 : -1].double() / temperature
        (z.logsumexp(-1) - z.mean(-1) - math.log(V)).mean()

    That is KL(uniform || policy), in nats, over the V rows of the head; higher is surer. It is computed without
    gradient, in eval mode, in one product with the head, in slices, per `micro_batch` completions (None: all at once),
    so that memory holds their hidden states and slices within `memory_budget` bytes, never their logits.
    The end-of-text token that ends a completion is a token of it; padding never is. A token that `completion_mask`
    turns off is read but not counted. temperature: None takes the trainer's.
    Raises ConfigError before `bind` and for a trainer or head it cannot score, ShapeError for an empty completion or
    prompt, a mask of nothing, and what exceeds the model's context, LabelError, NotFiniteError, OptionError.
    Zhao et al., arXiv 2505.19590; self-certainty: Kang et al., arXiv 2502.18581.
    """

    def __init__(
        self,
        *,
        temperature: float | None = None,
        micro_batch: int | None = None,
        memory_budget: int | None = None,
        name: str = "self_certainty",
    ) -> None:
        if temperature is not None and not is_temperature(temperature):
            raise OptionError(
                f"temperature: expected a number in {TEMPERATURES}, or None for the trainer's, got {temperature!r}"
            )
        if micro_batch is not None and micro_batch < 1:
            raise OptionError(f"micro_batch must be 1 completion or more, or None for all, got {micro_batch}")
        self.temperature, self.micro_batch, self.memory_budget = temperature, micro_batch, memory_budget
        self.__name__ = name  # TRL's metrics: rewards/NAME/mean
        self._policy: Policy | None = None

    def bind(self, policy: Any, tokenizer: Any = None) -> SelfCertaintyReward:
        """Scores with this trainer's policy, looked up at each call, or with this model; returns itself.

        A trainer gives its model (wrapped or sharded as it is by then), its temperature, autocast and tokenisation.
        A model needs `tokenizer`, or calls that pass `prompt_token_ids`.
        """
        self._policy = OfTrainer(policy) if hasattr(policy, "accelerator") else OfModel(policy, tokenizer)
        return self

    def __call__(
        self,
        /,
        prompts: Sequence[Any] | None = None,
        completions: Sequence[Any] | None = None,
        completion_ids: Sequence[Ids] | None = None,
        *,
        prompt_token_ids: Sequence[Ids] | None = None,
        completion_mask: Sequence[Sequence[int]] | None = None,
        log_metric: Callable[[str, float], None] | None = None,
        **_: Any,
    ) -> list[float]:
        """One reward per completion. TRL passes no prompt_token_ids and completion_mask: a column or rollout may."""
        if self._policy is None:
            raise ConfigError("SelfCertaintyReward has no policy: call reward.bind(trainer) before trainer.train()")
        if completion_ids is None:
            raise ConfigError("SelfCertaintyReward scores token ids: pass completion_ids, as TRL does")
        if prompt_token_ids is None:
            prompt_token_ids = self._policy.prompt_ids(list(prompts or ()))
        rows = rows_of(prompt_token_ids, completion_ids, completion_mask)
        scores = self._score(self._policy, rows)
        if log_metric is not None:
            log_metric("self_certainty/mean", sum(scores) / len(scores))
        return scores

    @torch.no_grad()
    def _score(self, policy: Policy, rows: list[Row]) -> list[float]:
        model, size = policy.model, self.micro_batch or len(rows)
        check_rows(rows, model)
        temperature = policy.temperature if self.temperature is None else self.temperature

        def certainty(head: LMHead, hidden: Tensor) -> Tensor:
            return token_stats(
                hidden, head, want=("self_certainty",), temperature=temperature, memory_budget=self.memory_budget
            ).self_certainty

        scores: list[float] = []
        with evaluating(model), policy.autocast():
            # Every rank makes as many calls as the others: sharded weights are gathered together.
            for begin in range(0, len(rows), size):
                part = rows[begin : begin + size]
                batch, row, before = batch_of(part, next(model.parameters()).device)
                values = forward_with(
                    model, batch, lambda inner, h, r=row, b=before: through_head(inner, certainty, h[r, b])
                )
                counts = [sum(one.valid) for one in part]
                scores += [float(mean) for mean in torch.stack([v.mean() for v in values.split(counts)])]
        return finite(scores)


class Policy(Protocol):
    """What a reward scores with: the live model, the sampling temperature, and how prompts become ids."""

    temperature: float

    @property
    def model(self) -> nn.Module: ...

    def prompt_ids(self, prompts: list[Any]) -> Sequence[Ids]: ...

    def autocast(self) -> AbstractContextManager[Any]: ...


class OfTrainer:
    """A TRL trainer's policy. `_tokenize_prompts` is what the trainer itself made the prompts' ids with."""

    def __init__(self, trainer: Any) -> None:
        for name in ("_tokenize_prompts", "temperature"):
            if not hasattr(trainer, name):
                kind = type(trainer).__name__
                raise ConfigError(
                    f"{kind} has no {name}: expected a GRPOTrainer or RLOOTrainer of TRL 1.x; bind a model"
                )
        if getattr(trainer, "tools", None):
            raise ConfigError(
                "self-certainty with tools: TRL gives rewards no mask of the tools' tokens; leave tools out"
            )
        self.trainer, self.temperature = trainer, trainer.temperature

    @property
    def model(self) -> nn.Module:
        return self.trainer.model  # looked up: FSDP and resuming replace it

    def prompt_ids(self, prompts: list[Any]) -> Sequence[Ids]:
        if getattr(self.trainer, "rollout_func", None) is not None:
            raise ConfigError(
                "rollout_func makes prompt ids of its own: return them as 'prompt_token_ids' too, beside 'prompt_ids'"
            )
        ids, images, fields = self.trainer._tokenize_prompts(prompts)
        if images or set(fields) - {"token_type_ids"}:
            found = ", ".join(["images"] * bool(images) + list(fields))
            raise ConfigError(f"self-certainty scores text, these prompts have {found} too; leave them out")
        return ids

    def autocast(self) -> AbstractContextManager[Any]:
        return self.trainer.accelerator.autocast()


class OfModel:
    """A model by itself; text becomes ids as TRL's trainers do it by default."""

    temperature = 1.0

    def __init__(self, model: Any, tokenizer: Any) -> None:
        causal_lm(model)  # raises for what is no language model
        self._model, self.tokenizer = model, tokenizer

    @property
    def model(self) -> nn.Module:
        return self._model

    def autocast(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def prompt_ids(self, prompts: list[Any]) -> Sequence[Ids]:
        if self.tokenizer is None:
            raise ConfigError("a reward bound to a model needs bind(model, tokenizer), or prompt_token_ids in its call")
        if prompts and isinstance(prompts[0], list):
            made = self.tokenizer.apply_chat_template(
                conversation=prompts, add_generation_prompt=True, tokenize=True, return_dict=True
            )
            return made["input_ids"]
        return self.tokenizer(text=prompts)["input_ids"]


def finite(scores: list[float]) -> list[float]:
    """The scores; NotFiniteError names the first that is no number."""
    for i, score in enumerate(scores):
        if score != score or score in (float("inf"), float("-inf")):
            raise NotFiniteError(
                f"self-certainty of completion {i} is {score}: the policy's hidden states are not finite; "
                "lower the learning rate and go back to the last checkpoint"
            )
    return scores
