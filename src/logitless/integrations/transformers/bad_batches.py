"""Batches without a token that counts, and losses that are no number: errors of one line."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ...errors import LabelError, NotFiniteError
from ...vocab.face import current_sizing


class Watch:
    """Raises NotFiniteError for a loss that is NaN, and makes a GPU wait for nothing that it would not wait for.

    A loss on the CPU is looked at where it was computed. One on a GPU is looked at before the next: the pass reads
    the next labels on the host anyway, and the last loss is long there by then. Under torch.compile nothing is.
    """

    def __init__(self) -> None:
        self.is_nan: Tensor | None = None  # of the last loss, ()
        self.begun = False  # a loss before was a number

    def before(self) -> None:
        """Looks at the last loss, where nobody has done so yet."""
        if torch.compiler.is_compiling() or self.is_nan is None:
            return
        is_nan, self.is_nan = self.is_nan, None
        if bool(is_nan):
            again = "lower the learning rate and go back to the last checkpoint"
            hint = again if self.begun else "it is the first loss: load finite weights, or load them in float32"
            raise NotFiniteError(f"hidden states: expected finite numbers, got a loss of NaN from them; {hint}")
        self.begun = True

    def after(self, loss: Tensor) -> None:
        """Takes note of a loss, (), and looks at it if it is here."""
        if torch.compiler.is_compiling() or current_sizing() is not None:  # numbers that do not exist
            return
        self.is_nan = loss.detach().isnan()
        if loss.device.type == "cpu":
            self.before()


def check_counts(targets: Tensor, ignore_index: int, items: Tensor | float | None) -> None:
    """LabelError where no token of the whole batch counts: `items` of all its parts, or this part where that is None.

    Only where gradients are asked for: an evaluation goes on, with what `or_empty` gives. A part without a token is
    right where others have some: gradient accumulation, other ranks. The pass reads on the host which labels count, so
    that this waits for nothing more.
    """
    if torch.compiler.is_compiling() or not torch.is_grad_enabled() or bool((targets != ignore_index).any()):
        return
    if items is None or float(items) == 0:
        raise LabelError(
            f"labels: expected a token that counts, got {targets.numel()} targets of {ignore_index}; drop the batch, "
            "or pass num_items_in_batch, as Trainer does, if it is a part of a larger one"
        )


def or_empty(
    loss: Tensor, targets: Tensor, ignore_index: int, items: Tensor | float | None, empty: float | None
) -> Tensor:
    """The loss, or `empty` where no token of the whole batch counts; None: NaN in an evaluation, as transformers' is.

    Trainer leaves that out of its eval_loss from transformers 5.23 on, unless logging_nan_inf_filter=False or every
    batch is such; before 5.23, eval_loss is NaN, as without us.
    """
    if empty is None and torch.is_grad_enabled():
        return loss
    counts = (targets != ignore_index).any().to(loss.device)
    if items is not None:
        counts = counts | (torch.as_tensor(items, device=loss.device) != 0).any()
    return torch.where(counts, loss, math.nan if empty is None else empty)
