"""GRPO with the exact KL to the reference in the place of its one-sample estimate."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ...vocab.face import LMHead
from ..transformers.lm_head import captured, forward_with, head_of, replaced

NEWTON_STEPS = 12  # quadratic from above: 6 reach float64 for every KL from 1e-16 to 1e4


class ExactKL:
    """Gives `GRPOTrainer._compute_loss` the reference log-probs at which its k3 is the exact KL.

    TRL reads the reference through x = ref_logprob - logprob alone, as k3(x) = e^x - x - 1. With x the root of
    k3(x) = KL(policy ‖ reference), value, gradient, aggregation and the metric `kl` are all TRL's own. Its correction
    for the sampling, an importance ratio on k3, is off meanwhile: on an exact KL it would be noise.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.before = trainer._generate_and_score_completions
        self.batch: dict[str, Any] | None = None  # the batch whose loss is being computed

    def methods(self) -> dict[str, Callable[..., Any]]:
        """What takes the place of the trainer's methods, by name."""
        return {"_generate_and_score_completions": self.rollouts, "_compute_loss": self.compute_loss}

    def rollouts(self, inputs: Any) -> dict[str, Any]:
        """Completions with their rewards, without the reference's log-probs, which `put` would replace."""
        with replaced(self.trainer, "beta", 0.0):  # TRL then runs no reference, and reads it for nothing else here
            return self.before(inputs)

    def compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        """The trainer's loss, whose penalty is the exact KL."""
        args, self.batch = self.trainer.args, dict(inputs)
        corrected, args.use_bias_correction_kl = args.use_bias_correction_kl, False  # there is no sampling to correct
        try:
            loss = type(self.trainer)._compute_loss(self.trainer, model, self.batch)
        finally:
            self.batch, args.use_bias_correction_kl = None, corrected
        return loss.to(inputs["advantages"].dtype)  # the KL was float64 on its way

    @torch.no_grad()
    def reference(
        self, model: Any, forward: Callable[..., Any], kwargs: dict[str, Any]
    ) -> tuple[Tensor, LMHead] | None:
        """The reference's hidden states for the policy's inputs, and its head; None outside of a loss."""
        if self.batch is None:
            return None
        if self.trainer.ref_model is not None:
            return forward_with(self.trainer.ref_model, kwargs, lambda own, hidden: (hidden, head_of(own)))
        with self._without_adapter(model), captured(model, forward, **kwargs) as (hidden, _):
            return hidden, head_of(model)

    def put(self, log_probs: Tensor, kl: Tensor) -> None:
        """Where `_compute_loss` looks for the reference's log-probs, right after the policy's forward."""
        if self.batch is not None:
            width = self.batch["completion_ids"].shape[1]
            self.batch["ref_per_token_logps"] = (log_probs.double() + gap(kl))[:, -width:]

    @contextmanager
    def _without_adapter(self, model: Any) -> Iterator[None]:
        from trl.models.utils import disable_gradient_checkpointing
        from trl.trainer.utils import use_adapter

        policy = self.trainer.accelerator.unwrap_model(self.trainer.model)
        initial = "ref" if "ref" in policy.peft_config else None
        plain = disable_gradient_checkpointing(model, self.trainer.args.gradient_checkpointing_kwargs)
        with plain, use_adapter(policy, initial):
            yield


def gap(kl: Tensor) -> Tensor:
    """x >= 0 with e^x - x - 1 = kl, float64, differentiable.

    Dense equivalent: scipy.optimize.brentq(lambda x: exp(x) - x - 1 - kl, 0, inf). At kl = 0 the gradient is 0.
    """
    return _Gap.apply(kl)  # pyright: ignore[reportReturnType]


class _Gap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, kl: Tensor) -> Tensor:
        k = kl.double()
        # Both bound the root from above, so that Newton's steps on a convex function only ever go down to it.
        x = torch.minimum((2 * k).sqrt(), torch.log1p(k + (2 * k).sqrt()))
        for _ in range(NEWTON_STEPS):
            derivative = torch.expm1(x)
            x = torch.where(derivative > 0, x - (derivative - x - k) / derivative, x)
        x = x.clamp(min=0)
        ctx.save_for_backward(x)
        ctx.dtype = kl.dtype
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        (x,) = ctx.saved_tensors
        return torch.where(x > 0, grad / torch.expm1(x), 0).to(ctx.dtype)
