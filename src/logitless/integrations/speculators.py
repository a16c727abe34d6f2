"""speculators' draft models trained from hidden states: neither the draft's nor the verifier's logits are made.

    model = Eagle3DraftModel.from_training_args(...)  # or PEagleDraftModel, DFlashDraftModel
    logitless.integrations.speculators.install(model)

Works with speculators 0.9. Its models slice, roll and index logits by token, and hand them to a loss and to argmax. In
their place go hidden states that know their head.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ConfigError
from ..losses import distill
from ..vocab.face import LMHead, token_stats
from .seam import Seam

MODELS = "speculators.models."
METRICS = ("logits", "targets", "loss_mask")
HOST = Seam(
    "speculators",
    ">=0.9,<0.10",
    {
        f"{MODELS}eagle3.core:Eagle3DraftModel.forward": (),
        f"{MODELS}peagle.core:PEagleDraftModel.forward": (),
        f"{MODELS}dflash.core:DFlashDraftModel.forward": (),
        f"{MODELS}eagle3.metrics:compute_metrics": (
            *METRICS, "prev_correct", "ttt_step", "ttt_step_loss_decay", "loss_config",
        ),
        f"{MODELS}peagle.metrics:compute_metrics": (*METRICS, "anchor_pos", "depth", "num_depths", "loss_config"),
        f"{MODELS}dflash.metrics:compute_metrics": (
            *METRICS, "block_size", "gamma", "loss_config", "per_position_loss_weight", "dpace_alpha",
            "sample_from_anchor",
        ),
        "speculators.losses.utils:resolve_loss_config": ("spec", "implementation"),
    },
)  # fmt: skip
KINDS = ("Eagle3DraftModel", "PEagleDraftModel", "DFlashDraftModel")
HEADS = ("lm_head", "verifier_lm_head")
SEEN = ("shape", "device", "dtype", "requires_grad", "is_cuda")
ARGMAX = (torch.argmax, Tensor.argmax)


def _selected(hidden: Tensor, index: Any) -> Tensor | None:
    """Rows of hidden states, None where the index reaches into them, or might."""
    parts = index if isinstance(index, tuple) else (index,)
    # a mask takes as many dimensions as it has
    taken = sum(p.dim() if isinstance(p, Tensor) and p.dtype == torch.bool else p is not None for p in parts)
    reaches = any(p is Ellipsis for p in parts) or (taken >= hidden.dim() and parts[-1] != slice(None))
    return None if reaches else hidden[index]


def _rolled(hidden: Tensor, shifts: Any, dims: Any = None) -> Tensor | None:
    """Rows (1, T, H) in another order, None where the numbers in them would be."""
    return torch.roll(hidden, shifts, dims) if dims == 1 and hidden.dim() == 3 else None


BY_TOKEN = {Tensor.__getitem__: _selected, torch.roll: _rolled}  # what keeps a row of hidden states a row


class HeadInput(Tensor):
    """Hidden states (1, T, H) in the place of their head's logits (1, T, V).

    `shape` and `argmax(dim=-1)` are the logits', and what selects or rolls tokens gives a HeadInput; whatever else is
    asked of logits is a ConfigError, since it would be of hidden states.
    """

    head: LMHead
    budget: int | None

    @classmethod
    def of(cls, hidden: Tensor, head: LMHead, budget: int | None) -> HeadInput:
        found = hidden.as_subclass(cls)
        found.head, found.budget = head, budget
        return found

    def plain(self) -> Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(Tensor)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if not args and "input" in kwargs:  # torch's name of the first
            args = (kwargs.pop("input"),)
        self, name = args[0] if args else None, getattr(func, "__name__", "")
        if not isinstance(self, HeadInput):  # an operand beside another, or one of a list
            raise _of_logits(name or func)
        if func in ARGMAX and (args[1:], kwargs) in (((-1,), {}), ((), {"dim": -1})):
            with torch.no_grad():
                stats = token_stats(self.plain(), self.head, want=(), top_k=1, memory_budget=self.budget)
            return stats.top_k_ids[..., 0]
        with torch._C.DisableTorchFunctionSubclass():
            if func in BY_TOKEN:
                found = BY_TOKEN[func](self.as_subclass(Tensor), *args[1:], **kwargs)
                if found is not None:
                    return cls.of(found, self.head, self.budget)
            if name == "__get__" and (asked := getattr(func.__self__, "__name__", "")) in SEEN:
                found = func(*args, **kwargs)
                return torch.Size((*found[:-1], self.head.rows)) if asked == "shape" else found
        raise _of_logits(name or func)


def _of_logits(asked: Any) -> ConfigError:
    return HOST.error(f"its model asks {asked} of logits, expected tokens' slices, argmax(dim=-1) and a loss")


LEAST = 1e-5  # the acceptance rate that speculators' nla takes in the place of smaller ones


def _of_both(loss: Callable[..., Tensor], want: tuple[str, ...], logits: Any, targets: Any) -> Tensor:
    """A loss (1, T) of statistics of the draft's distribution and the verifier's."""
    stats = token_stats(
        logits.plain(), logits.head, want=want, reference=(targets.plain(), targets.head), memory_budget=logits.budget
    )
    return loss(*(getattr(stats, name) for name in want))


def _ce(logits: Any, targets: Any) -> Tensor:
    """The cross-entropy (1, T) with the verifier's best entry."""
    labels = torch.argmax(targets, dim=-1)
    return -token_stats(logits.plain(), logits.head, labels, memory_budget=logits.budget).logprob


# By speculators' names; its kl_div is that of the draft from the verifier.
LOSSES: dict[str, Callable[[Any, Any], Tensor]] = {
    "kl_div": partial(_of_both, distill.forward_kl, ("reverse_kl",)),
    "rkl": partial(_of_both, distill.reverse_kl, ("kl",)),
    "jsd": partial(_of_both, distill.jsd, ("jsd",)),
    "ce": _ce,
    "tv": partial(_of_both, distill.total_variation, ("total_variation",)),
    "nla": partial(_of_both, partial(distill.negative_log_acceptance, least=LEAST), ("acceptance",)),
    "lk_hybrid": partial(_of_both, distill.lk_hybrid, ("reverse_kl", "total_variation")),
}


def streamed_losses(config: dict[str, Any] | None) -> dict[str, Any]:
    """speculators' losses by name and weight, computed from hidden states. Raises ConfigError."""
    from speculators.losses import resolve_loss_config  # pyright: ignore[reportMissingImports]

    config = config or resolve_loss_config("kl_div")
    other = sorted(set(config) - set(LOSSES))
    if other:
        raise ConfigError(f"loss_config: expected {', '.join(LOSSES)}, got {', '.join(other)}; uninstall for these")
    for name, (loss, _) in config.items():
        if loss not in [resolve_loss_config(name, kind)[name][0] for kind in ("fused", "eager")]:
            raise ConfigError(f"loss_config: {name}: expected speculators' own function, got {loss}; uninstall for it")
    return {name: (LOSSES[name], weight) for name, (_, weight) in config.items()}


def install(model: nn.Module, *, memory_budget: int | None = None) -> None:
    """Makes an EAGLE-3, P-EAGLE or DFlash draft model compute its losses and accuracies without logits, in place.

    Dense equivalent: the model's own forward, with the losses `kl_div`, `rkl`, `jsd`, `ce`, `tv`, `nla` and
    `lk_hybrid`.

    memory_budget: bytes of slices, 256 MiB unless given, up to 1 GiB on a GPU. The forward is not compiled as a
    whole. Raises ConfigError.
    Memory: slices within the budget, and of a frozen head one (T, H) buffer a statistic.
    """
    HOST.require()
    if type(model).__name__ not in KINDS:
        raise ConfigError(f"model: expected speculators' {', '.join(KINDS)}, got {type(model).__name__}")
    own = type(model).forward
    own = getattr(own, "_torchdynamo_orig_callable", own)  # speculators compiles it where there is CUDA

    def forward(self: Any, *args: Any, loss_config: Any = None, **kwargs: Any) -> Any:
        return own(self, *args, loss_config=streamed_losses(loss_config), **kwargs)

    def head_forward(self: Any, hidden: Tensor) -> HeadInput:
        return HeadInput.of(hidden, LMHead(self.weight, self.bias), memory_budget)

    for name in HEADS:
        head: Any = getattr(model, name)
        head.forward = MethodType(head_forward, head)
    model.forward = MethodType(forward, model)


def uninstall(model: Any) -> None:
    """Gives the model and its heads their own forwards back."""
    for module in (model, *(getattr(model, name) for name in HEADS)):
        module.__dict__.pop("forward", None)
