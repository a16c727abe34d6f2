"""`eager.sets` and the checks of a sampling mask as kernels: a program for each token's entries."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from ....algebra.online_softmax import Accumulation, Totals
from ....algebra.stats import Coefficients
from ...call.sampling_mask import Places, SamplingMask
from ..chunk import Chunk
from ..sets import Entries, Logits
from . import accumulate_kernels, sets_kernels
from .device import on
from .parts import accumulation_of, flags_of, flags_of_reference
from .slices import of_gradient, row_scales_of

kernels: Any = sets_kernels  # a launch turns plain numbers into what a kernel's signature says
COMPARED = 1024  # entries of a set that are compared with one another; of a larger one sorting is less work
BLOCKS = 64, 1024  # the fewest and the most entries that a program reads at a time


def look_at(mask: SamplingMask, rows: int, labels: Tensor | None, ignore_index: int) -> Places | None:
    """`eager.sets.look_at` in one launch: here it can be told at once."""
    n, ids = len(mask), mask.token_ids.contiguous()
    if not 0 < ids.shape[0] <= n * COMPARED // 2:
        return None
    tokens, doubts = torch.empty_like(ids), torch.empty(n, dtype=torch.int32, device=ids.device)
    labels_at = None if labels is None else ids.new_empty(n)
    with on(ids.device):
        kernels.look_at_sets[(n,)](
            ids,
            mask.offsets.contiguous(),
            ids if labels is None else labels.contiguous(),
            tokens,
            ids if labels_at is None else labels_at,
            doubts,
            rows,
            ignore_index,
            LABEL=labels is not None,
            MOST=COMPARED,
            BLOCK=BLOCKS[0],
        )
    return None if bool(doubts.any()) else Places(tokens, labels_at)


def accumulate(
    sums: frozenset[str], label: Tensor | None, entries: Entries, logits: Logits
) -> tuple[Accumulation, Tensor | None]:
    """`eager.sets.accumulate` in one launch."""
    z, z_ref = logits
    offsets, n = entries.offsets.contiguous(), entries.offsets.shape[0] - 1  # they may be a caller's column
    flags = flags_of(sums) | flags_of_reference(sums, z_ref is not None)
    fields = accumulate_kernels.FIELDS if z_ref is not None else accumulate_kernels.FIELDS[: accumulate_kernels.ALONE]
    state = torch.empty(len(fields), n, dtype=z.dtype, device=z.device)
    block = block_of(z, n)
    with on(z.device):
        kernels.accumulate_sets[(n,)](
            z,
            z if z_ref is None else z_ref,
            offsets,
            offsets if entries.labels_at is None else entries.labels_at,
            z if label is None else label,
            state,
            n,
            LABEL=entries.labels_at is not None,
            **flags,
            BLOCK=block,
            num_warps=max(1, block // 256),
        )
    return accumulation_of(state, flags)


def logits_grad(
    chunk: Chunk, entries: Entries, logits: Logits, totals: Totals, c: Coefficients, at_label: Tensor | None
) -> Tensor:
    """`eager.sets.logits_grad` in one launch, and two that lay out what it reads."""
    (z, z_ref), n, policy = logits, chunk.n_tokens, chunk.policy
    given, out = of_gradient(policy, totals, c), torch.empty_like(z)
    block = block_of(z, n)
    with on(z.device):
        kernels.logits_grad_sets[(n,)](
            z,
            z if z_ref is None else z_ref,
            entries.offsets.contiguous(),
            z if entries.labels_at is None else entries.labels_at,
            z if at_label is None else at_label,
            z if policy.outer is None else row_scales_of(policy, n, z.device),
            out,
            n,
            **given,
            LABEL=entries.labels_at is not None,
            REF=z_ref is not None,
            CAP=policy.outer is not None,
            BETA=chunk.jsd_beta,
            BLOCK=block,
            num_warps=max(1, block // 256),
        )
    return out


def block_of(z: Tensor, n: int) -> int:
    """The entries that a program reads at a time: as many as a token has on average, between the two BLOCKS."""
    return min(max(triton.next_power_of_2(triton.cdiv(z.shape[0], max(1, n))), BLOCKS[0]), BLOCKS[1])
