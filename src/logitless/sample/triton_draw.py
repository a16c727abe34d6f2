"""Drawing on a GPU: a chunk's tokens and their record in three launches, no number read by the host.

A greedy token, one by noise alone, or one among the best entries of a row: what reaches past these is `draw`'s.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from ..errors import OptionError
from ..vocab.backends.triton import draw_kernels
from ..vocab.backends.triton.device import on as on_device
from ..vocab.face import Accumulated, Chunk, Noise, capturing, check_logits
from .record import SampleRecord
from .rules import Rules

kernels: Any = draw_kernels
BLOCK = 256  # of one warp: what a block finds out needs no barrier
COUNTED = 1024  # entries that a warp counts at a time
LANES = 32  # best entries whose noise bounds that of others
PROGRAMS = 3300  # that a GPU's processors hold at once, or nearly


def suits(chunk: Chunk) -> bool:
    """Whether an accumulated chunk's rows are what the kernels read: fp32, of one slice, here in full."""
    return len(chunk.materialised) == 1 and chunk.policy.compute == torch.float32 and chunk.policy.head.shard is None


def recorded(
    chunk: Chunk, found: Accumulated, temperature: Tensor, noise: Noise, *, rules: Rules, keep: int
) -> SampleRecord | None:
    """`draw.recorded`; None where a row's draw reaches past its best entries.

    Raises NotFiniteError, and in a CUDA graph, where nobody could look, OptionError for rules that may reach further
    and for rows that the kernels do not read.
    """
    if not suits(chunk) or found.top_logits is None or found.top_ids is None:
        _refuse_in_graph(chunk, found)
        return None
    totals, top_logits, top_ids = found.totals, found.top_logits, found.top_ids
    width, n_topk = chunk.materialised[0].z.shape[1], top_logits.shape[1]
    looks = not (rules.none or rules.always_decided(n_topk, width))
    if looks and capturing(top_logits):
        raise OptionError(
            f"top_p, min_p: in a CUDA graph expected top_k in 1..{n_topk} as well, so that the best entries will do, "
            f"got {rules.top_k}; set top_k, or sample outside of the graph"
        )
    temperature = temperature.contiguous()
    with on_device(top_logits.device):
        look = _Look(chunk, totals.m, temperature, noise, top_logits, top_ids, rules.none)
    kept = None
    if not rules.none:
        x = (top_logits - totals.m[:, None]) / torch.where(temperature == 0, 1.0, temperature)[:, None]
        kept = rules.prefix(x, look.sums.sum(1).log())
        if looks and not bool((rules.decided(x, kept, width, torch) | (temperature == 0)).all()):
            return None
    with on_device(top_logits.device):
        whole, real, shown = look.tokens(kept, keep)
    if not capturing(top_logits):
        check_logits(totals.logsumexp)
    return SampleRecord(
        token=whole[0],
        token_logit=real[0],
        rank=whole[1],
        topk_logits=top_logits[:, :keep],
        topk_ids=shown,
        logsumexp=totals.logsumexp,
        mean_logit=totals.mean_logit,
        entropy=totals.entropy,
        temperature=temperature,
        logsumexp_at_temperature=real[1],
        log_kept_mass=real[2],
        n_kept=whole[2],
        vocab_size=width,
    )


def _refuse_in_graph(chunk: Chunk, found: Accumulated) -> None:
    if capturing(found.totals.m):
        got = f"{chunk.inputs.hidden.dtype} and {chunk.policy.head.weight.dtype}"
        raise OptionError(
            "sample_tokens: a CUDA graph wants hidden states and head of one dtype, not float64, whole on this "
            f"device, got {got}; cast one, or sample outside of the graph"
        )


class _Look:
    """One look at rows of logits z (n, V), in parts: what temperature and noise make of them."""

    def __init__(
        self, chunk: Chunk, m: Tensor, temperature: Tensor, noise: Noise, best: Tensor, ids: Tensor, alone: bool
    ) -> None:
        self.z = z = chunk.materialised[0].z
        self.best, self.ids, self.temperature = best, ids, temperature
        self.alone, self.masked = alone, chunk.may_be_infinite
        (n, width), self.n_topk = z.shape, best.shape[1]
        parts = max(1, min(PROGRAMS // max(1, n), triton.cdiv(width, BLOCK)))
        self.part_width = triton.cdiv(triton.cdiv(width, parts), BLOCK) * BLOCK
        self.parts = triton.cdiv(width, self.part_width)
        self.sums, self.noisy = torch.empty(2, n, self.parts, dtype=z.dtype, device=z.device)
        self.lives, self.places, self.aboves = torch.empty(3, n, self.parts, dtype=torch.int32, device=z.device)
        self.rows = (z, z.stride(0), m, temperature, noise.seeds.contiguous(), noise.positions.contiguous())
        if n:
            kernels.look_for_tokens[(n, self.parts)](
                *self.rows,
                self.noisy,
                self.places,
                self.sums,
                self.lives,
                best,
                ids,
                self.n_topk,
                width,
                self.parts,
                self.part_width,
                NOISE=alone,
                MASKED=self.masked,
                LANES=triton.next_power_of_2(min(LANES, self.n_topk)),
                BLOCK=BLOCK,
                num_warps=1,
                enable_fp_fusion=False,
            )

    def tokens(self, kept: Tensor | None, keep: int) -> tuple[Tensor, Tensor, Tensor]:
        """(token, rank, n_kept) and (logit, log-sum-exp at the temperature, log of the kept share), (3, n) each.

        And the ids of the `keep` best entries, (n, keep).
        """
        n, width = self.z.shape
        whole = torch.empty(3, n, dtype=torch.int32, device=self.z.device)
        real = torch.empty(3, n, dtype=self.z.dtype, device=self.z.device)
        shown = torch.empty(n, keep, dtype=torch.int32, device=self.z.device)
        if n and self.alone:  # whoever is among the best has its rank there
            self._count_above()
        if n:
            kernels.draw_tokens[(n,)](
                *self.rows,
                self.noisy,
                self.places,
                self.sums,
                self.lives,
                self.aboves,
                self.best,
                self.ids,
                self.ids if kept is None else kept,
                width,
                self.parts,
                self.n_topk,
                n,
                keep,
                whole,
                real,
                shown,
                RULES=kept is not None,
                MASKED=self.masked,
                PARTS=triton.next_power_of_2(self.parts),
                LANES=triton.next_power_of_2(self.n_topk),
                num_warps=1,
                enable_fp_fusion=False,
            )
        return whole, real, shown

    def _count_above(self) -> None:
        """How many logits of each part are higher than the token's."""
        n, width = self.z.shape
        kernels.count_above[(n, self.parts)](
            self.z,
            self.z.stride(0),
            self.temperature,
            self.noisy,
            self.places,
            self.best,
            self.ids,
            self.aboves,
            width,
            self.parts,
            self.part_width,
            self.n_topk,
            PARTS=triton.next_power_of_2(self.parts),
            BLOCK=COUNTED,
            num_warps=1,
        )
