"""Metrics of a Trainer's evaluation from statistics of each token, in the place of logits that it would gather."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn import functional as F

from ...errors import ConfigError
from ...units import perplexity
from ...vocab.face import LMHead, token_stats
from .lm_head import observed
from .masked import IGNORED

KEPT = ("logprob", "rank", "entropy")  # of each token, for predict and compute_metrics
TOP_K = 5


class Predictions(dict[str, Any]):
    """What evaluation keeps of each token: `KEPT` by name, (rows, tokens) each, beside its label; 0 where that is -100.

    logprob: of the label; rank: 1 where the label is the best entry; entropy: in nats. Whatever asks for more, as code
    that expects logits does, is a ConfigError.
    """

    def __init__(self, *given: Any) -> None:
        """Also those that a Trainer makes of several batches', which it pads by IGNORED where one is shorter."""
        super().__init__(*given)
        padded = self.get("rank") == IGNORED
        if not isinstance(padded, bool):  # of arrays; accelerate also makes shapes, lists and descriptions of them
            self.update({name: x * ~padded for name, x in self.items()})

    def __getitem__(self, name: Any) -> Any:
        if not isinstance(name, str) or name not in self:
            raise _no_logits(f"predictions[{name!r}]")
        return super().__getitem__(name)

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__") and name != "__array__":  # which numpy asks for
            raise AttributeError(name)
        raise _no_logits(f"predictions.{name}")

    def __dlpack__(self, **_: Any) -> NoReturn:
        raise _no_logits("torch.tensor(predictions)")

    __dlpack_device__ = __dlpack__  # torch.tensor looks for the one and asks for the other first

    @classmethod
    def __torch_function__(cls, function: Any, *given: Any) -> NoReturn:
        raise _no_logits(f"{function.__name__}(predictions)")


def _no_logits(asked: str) -> ConfigError:
    names = ", ".join(f"predictions[{name!r}]" for name in KEPT)
    return ConfigError(
        f"{asked} asks for logits, which install(trainer) does not make: ask for {names}, each beside label_ids, or "
        "for the perplexity, accuracy and entropy that evaluate() gives by itself; install(trainer, metrics=False) "
        "gathers logits"
    )


@dataclass
class Evaluation:
    """The steps and the loop of an evaluation, with the sums of what its tokens come to."""

    memory_budget: int | None = None
    shifted: bool = True  # a position predicts the token after it; not so in a masked language model
    sums: list[float] = field(default_factory=list)  # tokens, nats, right, within the best TOP_K, nats of entropy
    seen: dict[str, Tensor] = field(default_factory=dict)
    shape: tuple[int, ...] = ()  # of the batch's labels

    def loop(self, own: Callable[..., Any], *given: Any, metric_key_prefix: str = "eval", **more: Any) -> Any:
        """The Trainer's own evaluation_loop, and the metrics of its tokens."""
        outer, self.sums = self.sums, [0.0] * 5  # one that evaluates within compute_metrics
        try:
            out = own(*given, metric_key_prefix=metric_key_prefix, **more)
            for name, value in self.metrics().items():
                out.metrics.setdefault(f"{metric_key_prefix}_{name}", value)  # one of compute_metrics keeps its name
        finally:
            self.sums = outer
        return out

    def metrics(self) -> dict[str, float]:
        tokens, nats, right, near, entropy = self.sums
        if not tokens:
            return {}
        return {
            "perplexity": perplexity(nats / tokens),
            "accuracy": right / tokens,
            f"top_{TOP_K}_accuracy": near / tokens,
            "entropy": entropy / tokens,
        }

    def step(self, trainer: Any, own: Callable[[bool], Any], inputs: Any, loss_only: bool) -> tuple[Any, Any, Any]:
        """(loss, predictions, labels) of a batch; `own(alone)` is the Trainer's own step, for its loss alone or not."""
        self.seen = {}
        if inputs.get("labels") is None:
            return own(loss_only)
        self.shape = inputs["labels"].shape
        with observed(trainer.model, self._look):
            loss, *_ = own(True)
        if not self.seen:  # a compute_loss of one's own kept the labels from the model
            return (loss, None, None) if loss_only else own(False)
        found = trainer.accelerator.gather_for_metrics(_row_sums(self.seen))
        self.sums = [a + b for a, b in zip(self.sums, found.double().sum(0).tolist(), strict=True)]
        if loss_only:
            return loss, None, None
        kept = Predictions({name: self._beside_label(self.seen[name]) for name in KEPT})
        return loss, kept, inputs["labels"].detach().to(self.seen["rank"].device)

    def _beside_label(self, x: Tensor) -> Tensor:
        """What a position says beside the token that it predicts, (rows, tokens), without a soft prompt's."""
        return (F.pad(x[:, :-1], (1, 0)) if self.shifted else x)[:, -self.shape[1] :]

    def _look(self, head: LMHead, hidden: Tensor, targets: Tensor) -> None:
        if self.seen and targets.shape != self.shape:  # a compute_loss that calls the model for something else, too
            return
        with torch.no_grad():
            stats = token_stats(
                hidden, head, targets, want=KEPT, ignore_index=IGNORED, memory_budget=self.memory_budget
            )
        self.seen = {**vars(stats), "counts": targets != IGNORED}


def _row_sums(seen: dict[str, Tensor]) -> Tensor:
    """(B, 5): what `Evaluation.sums` adds up, of each row."""
    counts, rank = seen["counts"], seen["rank"]
    columns = (counts, -seen["logprob"], counts & (rank == 1), counts & (rank <= TOP_K), seen["entropy"])
    return torch.stack([x.float().sum(1) for x in columns], 1)
