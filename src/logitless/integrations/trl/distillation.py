"""Distillation trainers on the pass: divergences over the whole vocabulary from two heads."""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...vocab.face import LMHead, Options, token_loss
from ..transformers.lm_head import causal_lm, forward_with, head_of, through_head
from .contract import HOST
from .scores import IGNORED, Collected


def divergence(
    head: LMHead,
    hidden: Tensor,  # (..., H) of the student
    mask: Tensor,  # (...)
    teacher: tuple[Tensor, LMHead],  # (..., H'), a constant
    beta: float,
    temperature: float = 1.0,
    memory_budget: int | None = None,
) -> tuple[Tensor, Tensor]:
    """(Σ generalised JSD, Σ the student's entropy) over the tokens in `mask`, in 4 GEMMs, formed in the forward pass.

    Dense equivalent: with p the student and q the teacher, m = (1 - beta) * p + beta * q,

        (1 - beta) * kl(p, m) + beta * kl(q, m)  # kl(q, p) at beta = 0, kl(p, q) at beta = 1

    beta: 0..1. The entropy carries no gradient. Raises what `token_loss` raises. Agarwal et al., arXiv 2306.13649.
    """
    name = {0.0: "reverse_kl", 1.0: "kl"}.get(float(beta), "jsd")
    options: Options = {
        "want": (name, "entropy"),
        "reference": teacher,
        "temperature": temperature,
        "memory_budget": memory_budget,
        "ignore_index": IGNORED,
    }
    if name == "jsd":
        options["jsd_beta"] = beta
    collected = Collected(name)
    labels = torch.where(mask != 0, 0, IGNORED)  # of the labels only what is ignored matters
    loss = token_loss(collected, hidden, head, labels, reduction="sum", **options)
    entropies = [part["entropy"].sum() for part in collected.parts]
    return loss, torch.stack(entropies).sum() if entropies else loss.detach() * 0


def distillation_loss(trainer: Any, memory_budget: int | None) -> Callable[..., Any]:
    """`DistillationTrainer._compute_loss` with its divergence computed by `divergence`, for this trainer alone."""
    from trl.trainer.utils import maybe_gather_lm_head_ctx

    def chunked_divergence(
        student_hidden: Tensor,
        teacher_hidden: Tensor,
        _student_weight: Tensor,
        teacher_weight: Tensor,
        completion_mask: Tensor,
        beta: float,
        *,
        num_items_in_batch: Any = None,
        temperature: float = 1.0,
        teacher_lm_head_bias: Tensor | None = None,
        student_logit_scale: float = 1.0,
        teacher_logit_scale: float = 1.0,
        student_final_logit_softcapping: float | None = None,
        teacher_final_logit_softcapping: float | None = None,
        **_student: Any,
    ) -> tuple[Tensor, Tensor, Tensor]:
        with maybe_gather_lm_head_ctx(teacher_weight, teacher_lm_head_bias):  # pyright: ignore[reportArgumentType]
            weight, bias = _whole(teacher_weight), _whole(teacher_lm_head_bias)
            teacher_head = LMHead(weight, bias, teacher_logit_scale, teacher_final_logit_softcapping)

            def compute(head: LMHead, hidden: Tensor, mask: Tensor, teacher_hidden: Tensor) -> tuple[Tensor, Tensor]:
                # TRL's of the body's own output, which MiniCPM3 divides before its head
                head = replace(head, scale=student_logit_scale, softcap=student_final_logit_softcapping)
                return divergence(head, hidden, mask, (teacher_hidden, teacher_head), beta, temperature, memory_budget)

            student = causal_lm(trainer.model)
            loss, entropy = through_head(student, compute, student_hidden, completion_mask, teacher_hidden)
        valid = (completion_mask != 0).sum()
        count = valid.clamp(min=1) if num_items_in_batch is None else torch.as_tensor(num_items_in_batch)
        return loss / count.to(loss.device), entropy, valid

    own = type(trainer)._compute_loss
    return types.MethodType(_with_global(own, "_chunked_divergence_loss", chunked_divergence), trainer)


def gkd_loss(trainer: Any, memory_budget: int | None) -> Callable[..., Any]:
    """What takes the place of `GKDTrainer.compute_loss`; asked for outputs as well, TRL's own runs."""

    def compute_loss(
        model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        if return_outputs:
            return type(trainer).compute_loss(trainer, model, inputs, True, num_items_in_batch)
        batch = {name: inputs[name] for name in ("input_ids", "attention_mask")}
        mask = inputs["labels"][:, 1:] != IGNORED
        trainer.teacher_model.eval()
        with torch.no_grad():
            hidden, head = forward_with(trainer.teacher_model, batch, lambda own, hidden: (hidden, head_of(own)))
        teacher = hidden[:, :-1], head

        def end(own: Any, hidden: Tensor) -> Tensor:
            def compute(head: LMHead, hidden: Tensor, mask: Tensor) -> Tensor:
                return divergence(head, hidden, mask, teacher, trainer.beta, memory_budget=memory_budget)[0]

            with trainer.accelerator.autocast():  # that of the models' forwards ended with them
                return through_head(own, compute, hidden[:, :-1], mask)

        count = mask.sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch
        return forward_with(model, batch, end) / count

    return compute_loss


def _whole(parameter: Tensor | None) -> Any:
    """A constant parameter, gathered where it is sharded."""
    gather = getattr(parameter, "full_tensor", None)
    return parameter if gather is None else gather()


def _with_global(method: Callable[..., Any], name: str, value: Any) -> Callable[..., Any]:
    """A copy of `method` in which the global `name` is `value`: neither the module nor other trainers see it."""
    if name not in method.__code__.co_names:
        raise HOST.error(f"{method.__qualname__} no longer calls {name}")
    code, known = method.__code__, {**method.__globals__, name: value}
    copy = types.FunctionType(code, known, method.__name__, method.__defaults__, method.__closure__)
    copy.__kwdefaults__ = method.__kwdefaults__
    return copy
