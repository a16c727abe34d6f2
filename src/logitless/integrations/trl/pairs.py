"""CPO and ORPO: their `concatenated_forward` without the logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...vocab.face import LMHead, token_stats
from .scores import IGNORED


def pairs_forward(trainer: Any, kind: str) -> Callable[..., Any]:
    """What takes the place of `CPOTrainer.concatenated_forward` or ORPO's, on a model with our fused forward.

    The same numbers, but for the logits, of which the trainers log the mean alone: (1,) tensors that hold it.
    """
    orpo = kind == "ORPOTrainer"

    def concatenated_forward(model: Any, batch: dict[str, Any]) -> tuple[Tensor, ...]:
        joined = trainer.concatenated_inputs(
            batch,
            is_encoder_decoder=False,
            padding_value=trainer.padding_value if orpo else trainer.pad_token_id,
            device=trainer.accelerator.device,
        )
        ids, attended = joined["concatenated_input_ids"], joined["concatenated_attention_mask"]
        answers = joined["concatenated_labels"]
        n = len(batch["chosen_labels"])
        # ORPO's likelihood term takes the chosen prompts in as well
        likelihood_labels = ids.masked_fill(attended != 1, IGNORED) if orpo else answers
        labels = torch.cat([torch.where(answers == IGNORED, likelihood_labels, answers)[:n], answers[n:]])
        asked = {"output_router_logits": True} if trainer.aux_loss_enabled else {}
        out = model(input_ids=ids, attention_mask=attended, labels=labels, fused_lm_head=True, **asked)

        valid = answers[:, 1:] != IGNORED
        logps = (out.log_probs[:, -valid.shape[1] :] * valid).sum(-1)  # a soft prompt's come first
        if orpo or trainer.loss_type in ("ipo", "simpo"):
            logps = logps / valid.sum(-1)
        nll = -out.log_probs[:n].sum() / (likelihood_labels[:n, 1:] != IGNORED).sum()
        if not orpo and trainer.cpo_alpha == 0:
            nll = torch.zeros((), device=nll.device)
        means = out.mean_logits
        aux = (out.aux_loss,) if trainer.aux_loss_enabled else ()
        return logps[:n], logps[n:], means[:1], means[1:], nll, *aux

    return concatenated_forward


def mean_logits(kind: str, head: LMHead, hidden: Tensor) -> Tensor:  # (2n, T, H) -> (2,)
    """The mean logit of the chosen and of the rejected sequences over all positions, as CPO and ORPO log it.

    Without a softcap a logit is linear in the hidden state, and its mean that of the mean hidden state.
    """
    hidden = hidden.detach()[:, : -1 if kind == "ORPOTrainer" else None]
    halves = torch.stack([half.flatten(0, 1) for half in hidden.chunk(2)])  # (2, n·T, H)
    if head.softcap is None:
        halves = halves.float().mean(1, keepdim=True).to(hidden.dtype)
    with torch.no_grad():
        return token_stats(halves, head, want=("mean_logit",)).mean_logit.mean(1)
