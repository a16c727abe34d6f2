"""`SparseBackward`: gradients without the parts of p that hardly count, and a certificate of what was left out."""

from __future__ import annotations

from numbers import Real

import torch
from torch import Tensor

from ...algebra.options import whole_from
from ...errors import OptionError

BOUNDED = frozenset({"p", "plogp", "p2"})  # bases of the gradient that running sums can bound slice by slice


class SparseBackward:
    """Leaves out of a head's backward pass what a bound on each token's probability mass allows; off unless given.

    Dense equivalent, for the slices of `width` vocabulary entries of one token, its label apart:

        p = z.softmax(-1)
        slices = p.split(width)  # views: what is set to 0 in them is so in p
        mass, order = torch.stack([x.sum() for x in slices]).sort()
        for i in order[mass.cumsum(0) <= bound]:
            slices[i].zero_()  # in the gradient, not in the loss
        dz = c * p  # c: the coefficient of p in dL/dz, -upstream for logprob

    The products of backward shrink to the tokens that each slice still has. Values, and the gradient's terms of the
    label, the best entries and candidates, are exact. With m the mass that token i leaves out, s = scale/temperature:

        ‖Δ dL/d(h·Wᵀ)‖₁ ≤ |s·c|·m         ‖Δ dh‖  ≤ |s·c|·m·max‖W_v‖
        ‖Δ dW‖ ≤ Σ_i |s·c|·m·‖h‖          ‖Δ db‖₁ ≤ Σ_i |s·c|·m

    and m ≤ bound, relative to the upstream gradient so that a loss scale changes nothing; a token whose c is 0 leaves
    out all. Where entropy is wanted too, m counts Σ p·|log p| of a slice if that is more than its Σ p, and |c| is the
    sum of both coefficients'. Of cross-entropy every error has one sign: it leaves rare entries where they are.

    bound: 0 ≤ bound < 1; width: most entries of a slice, finer ones leave out little more and multiply slower.
    Afterwards, of the latest gradient that was formed from slices, as tensors that nobody has waited for:
    `skipped_mass`, the largest m; `logit_error`, Σ_i |s·c|·m (for a loss whose gradient is formed in the forward pass,
    at an upstream gradient of 1); `skipped_share`, of (token, entry) pairs without backward products. `str` says all
    in a line. With a frozen head and few statistics there are no slices in backward, and nothing is left out; such a
    call takes backend "eager" all the same, on a GPU too, and one for values unless it is under torch.no_grad().
    For logprob, logsumexp, cross-entropy, entropy, self_certainty, sum_sq_prob; backend "eager", which on a GPU waits
    for the device once a chunk. Raises OptionError for a bound or width without a meaning, and by the call for
    statistics whose gradient p does not bound, of which self_certainty is one where the head has a softcap, a
    reference, a sharded head and a CUDA graph.
    Memory: beside the slices 3·(H + rank) elements for each token of a chunk, and a byte for each token and slice.
    After the gradient filter of Wijmans et al., arXiv 2411.09009, which bounds entries instead of what they add up to.
    """

    def __init__(self, bound: float, width: int = 2048) -> None:
        if isinstance(bound, bool) or not isinstance(bound, Real) or not 0 <= bound < 1:
            raise OptionError(f"SparseBackward: bound must be a share of a token's mass, 0 ≤ bound < 1, got {bound}")
        self.bound, self.width = float(bound), whole_from("SparseBackward: width", width, 1)
        self._parts: list[tuple[Tensor, Tensor]] = []  # of each chunk: largest mass, error
        self._computed = self._pairs = 0  # (token, entry) pairs

    def begin(self) -> None:
        """Forget the call before."""
        self._parts, self._computed, self._pairs = [], 0, 0

    def add(self, mass: Tensor, weight: Tensor, computed: int, pairs: int) -> None:
        """A chunk's part of the certificate: mass and weight (C,), and how many of `pairs` were computed."""
        left = torch.where(weight == 0, 0.0, mass)
        self._parts.append((left.amax(), (weight * left).sum()))
        self._computed += computed
        self._pairs += pairs

    def scale(self, factor: Tensor) -> None:
        """Count the errors at another upstream gradient, `factor` times as large."""
        self._parts = [(mass, error * factor.abs()) for mass, error in self._parts]

    @property
    def skipped_mass(self) -> Tensor:
        """The largest mass that a token left out, ()."""
        return torch.stack([part[0] for part in self._parts]).amax() if self._parts else torch.zeros(())

    @property
    def logit_error(self) -> Tensor:
        """At most by how much dL/d(h·Wᵀ) of all tokens is off, in sum of absolutes, ()."""
        return torch.stack([part[1] for part in self._parts]).sum() if self._parts else torch.zeros(())

    @property
    def skipped_share(self) -> Tensor:
        """The share of (token, entry) pairs without backward products, ()."""
        return torch.tensor(1 - self._computed / self._pairs if self._pairs else 0.0, dtype=torch.float64)

    def __repr__(self) -> str:
        return f"SparseBackward(bound={self.bound:g}, width={self.width})"

    def __str__(self) -> str:
        return (
            f"bound {self.bound:g} of a token's mass: at most {float(self.skipped_mass):.3g} left out, which moves "
            f"dL/dz by at most {float(self.logit_error):.3g} in all; {float(self.skipped_share):.1%} of backward's "
            f"products skipped, in slices of {self.width} entries"
        )
