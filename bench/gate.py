"""The gate: a method is timed only when its values and gradients agree with float64."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from bench.cases import Case, Shape, Tensors, make_tensors, step

LIMIT = 1e-4  # fp32 methods are at 1e-6 to 1e-5; a dropped term, a wrong scale or bf16 logits are past 1e-3
CHUNK = 256  # tokens


def write_oracle(case: Case, shape: Shape, folder: Path) -> None:
    """The dense definition in float64, some tokens at a time, one .npy for each output."""
    tensors = make_tensors(case, shape, torch.float64)
    out: dict[str, list[Tensor]] = {}
    for start in range(0, shape.tokens, CHUNK):
        rows = slice(start, start + CHUNK)
        part = {k: t if k.endswith("weight") else t[rows] for k, t in tensors.items()}
        part = {k: t.detach() for k, t in part.items()}
        for name, value in step(case, case.dense, part, share=len(part["labels"]) / shape.tokens).items():
            if name in ("loss", "grad_weight") and name in out:
                out[name][0] += value
            else:
                out.setdefault(name, []).append(value)
    for name, parts in out.items():
        np.save(folder / f"{name}.npy", (torch.cat(parts) if parts[0].dim() else parts[0]).numpy())


def row_error(got: Tensor, expected: np.ndarray) -> float:
    """Largest error of a row over the norm of that row, or of the median row where that is larger.

    Row by row, because a head's gradient has a few large rows (the labels) that would hide the others.
    """
    if tuple(got.shape) != expected.shape:
        return float("inf")
    width = expected.shape[1] if expected.ndim == 2 else 1
    want, have = expected.reshape(-1, width), got.reshape(-1, width)
    errors, norms = [], []
    for start in range(0, len(want), 8192):  # blocks, so that the check needs little memory
        block = torch.from_numpy(np.array(want[start : start + 8192]))
        norms.append(block.norm(dim=1))
        errors.append((have[start : start + 8192].double() - block).norm(dim=1))
    norm, error = torch.cat(norms), torch.cat(errors)
    worst = (error / norm.clamp_min(norm.median().item())).max().item()
    return worst if worst == worst else float("inf")


def errors_against(folder: Path, outputs: Tensors) -> dict[str, float]:
    """The row error of each output of the oracle; infinite for one that is missing."""
    return {
        file.stem: row_error(outputs[file.stem], np.load(file, mmap_mode="r")) if file.stem in outputs else float("inf")
        for file in sorted(folder.glob("*.npy"))
    }
