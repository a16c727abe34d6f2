"""Drawing on a GPU: a chunk's tokens and their record in two launches, no number read by the host.

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
BLOCK = 2048
PROGRAMS = 1056  # a few for each of a GPU's processors


def suits(chunk: Chunk) -> bool:
    """Whether an accumulated chunk's rows are what the kernels read: fp32, of one slice, here in full."""
    return len(chunk.materialised) == 1 and chunk.policy.compute == torch.float32 and chunk.policy.head.shard is None


def always_decided(rules: Rules, retained: int, vocab_size: int) -> bool:
    """Whether every draw under the rules ends among the retained entries, whatever the logits are."""
    return rules.none or retained >= min(rules.top_k or vocab_size, vocab_size)


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
    looks = not always_decided(rules, n_topk, width)
    if looks and capturing(top_logits):
        raise OptionError(
            f"top_p, min_p: in a CUDA graph expected top_k in 1..{n_topk} as well, so that the best entries will do, "
            f"got {rules.top_k}; set top_k, or sample outside of the graph"
        )
    temperature = temperature.contiguous()
    with on_device(top_logits.device):
        look = _Look(chunk.materialised[0].z, totals.m, temperature, noise, rules.none)
    kept = None
    if not rules.none:
        x = (top_logits - totals.m[:, None]) / torch.where(temperature == 0, 1.0, temperature)[:, None]
        kept = rules.prefix(x, look.sums.sum(1).log())
        if looks and not bool((rules.decided(x, kept, width, torch) | (temperature == 0)).all()):
            return None
    with on_device(top_logits.device):
        whole, real = look.tokens(top_logits, top_ids, kept)
    if not capturing(top_logits):
        check_logits(totals.logsumexp)
    return SampleRecord(
        token=whole[0],
        token_logit=real[0],
        rank=whole[1],
        topk_logits=top_logits[:, :keep],
        topk_ids=top_ids[:, :keep].int(),
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

    def __init__(self, z: Tensor, m: Tensor, temperature: Tensor, noise: Noise, alone: bool) -> None:
        n, width = z.shape
        self.z, self.alone = z, alone
        self.parts = max(1, min(PROGRAMS // max(1, n), triton.cdiv(width, BLOCK)))
        blocks = triton.cdiv(triton.cdiv(width, self.parts), BLOCK)
        self.sums, noisy = torch.empty(2, n, self.parts, dtype=z.dtype, device=z.device)
        lives = torch.empty(n, self.parts, dtype=torch.int32, device=z.device)
        places = torch.empty(n, self.parts, dtype=torch.int64, device=z.device)
        rows = (z, z.stride(0), m, temperature, noise.seeds.contiguous(), noise.positions.contiguous())
        self.common = (*rows, noisy, places, self.sums, lives)
        if n:
            kernels.look_for_tokens[(n, self.parts)](
                *self.common,
                width,
                self.parts,
                blocks * BLOCK,
                NOISE=alone,
                BLOCK=BLOCK,
                num_warps=8,
                enable_fp_fusion=False,
            )

    def tokens(self, top_logits: Tensor, ids: Tensor, kept: Tensor | None) -> tuple[Tensor, Tensor]:
        """(token, rank, n_kept) and (logit, log-sum-exp at the temperature, log of the kept share), (3, n) each."""
        (n, width), n_topk = self.z.shape, top_logits.shape[1]
        whole = torch.empty(3, n, dtype=torch.int32, device=top_logits.device)
        real = torch.empty(3, n, dtype=top_logits.dtype, device=top_logits.device)
        if n:
            kernels.draw_tokens[(n,)](
                *self.common,
                top_logits,
                ids,
                ids if kept is None else kept,
                width,
                self.parts,
                n_topk,
                n,
                whole,
                real,
                RULES=kept is not None,
                PARTS=triton.next_power_of_2(self.parts),
                LANES=triton.next_power_of_2(n_topk),
                BLOCK=4096,
                num_warps=8,
                enable_fp_fusion=False,
            )
        return whole, real
