"""The gradient through T steps from one graph of all positions, by sweeps."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from ..errors import GradientError


@dataclass(eq=False)
class Carried:
    """A graph that reads `rows`, leaves, and produces from them the rows that should have been read, `produced`.

    The two are equal; what is missing is the gradient from each row that is read to where it was produced. With J the
    Jacobian of `produced` with respect to `rows`, strictly lower triangular in the steps, the gradient of a loss with
    respect to the rows is Σ_i (Jᵀ)ⁱ·g, g its gradient in the graph: T - 1 terms at most, each a backward sweep.
    GradientError for a loss's own backward, or `autograd.grad` of it, which leave them out: see `watch`.
    """

    rows: Tensor  # (B, T - 1, H)
    produced: Tensor  # (B, T - 1, H)
    tolerance: float
    most: int
    sweeps: int = 0
    left: float = 1.0  # the last term's norm relative to the sum's
    guards: list[RemovableHandle] = field(default_factory=list, repr=False)

    def watch(self, *results: Tensor) -> None:
        """Refuse gradients through what losses are made of, until `backward` runs the sweeps that these would lack."""
        if self.due:
            self.guards += [x.register_hook(_refuse) for x in results if x.requires_grad]

    @property
    def due(self) -> int:
        """The most sweeps that a gradient takes."""
        return min(self.most, self.rows.shape[1])

    def backward(self, loss: Tensor) -> None:
        """The gradient of a loss into every parameter's `.grad`."""
        while self.guards:
            self.guards.pop().remove()
        total = torch.zeros_like(self.rows)
        outputs: Tensor = loss
        cotangent: Tensor | None = None
        self.sweeps, self.left = 0, 1.0
        while self.sweeps < self.due and self.left > self.tolerance:
            (cotangent,) = torch.autograd.grad(outputs, self.rows, cotangent, retain_graph=True)
            outputs = self.produced
            total += cotangent
            self.sweeps += 1
            self.left = float(cotangent.norm() / total.norm().clamp(min=torch.finfo(total.dtype).tiny))
        torch.autograd.backward([loss, self.produced], [torch.ones_like(loss), total])
        self.rows.grad = None


def _refuse(grad: Tensor) -> None:
    """Of a gradient that would stop at each token: a function of no object, since what it held would not be freed."""
    raise GradientError(
        "expected rollout.backward(loss), which runs the backward sweeps, got a backward or autograd.grad of the loss "
        "itself, whose gradient stops at each token: zero the gradients, generate again and call the former, or "
        "generate with carry='cached'"
    )
