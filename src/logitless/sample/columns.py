"""The columns of a record that `logitless score` writes: how they are stored and read, and what is refused there."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ..errors import DataError
from ..units import plural

if TYPE_CHECKING:
    import pyarrow

STORED = {"bfloat16": torch.bfloat16, "fp8": torch.float8_e4m3fn}  # how hidden states may be stored
LARGEST = torch.finfo(torch.float8_e4m3fn).max
PLACES = ["document", "position", "token"]  # what each row has, with a score or without
ROUNDING = 0.1  # of the log of summed probabilities: float32 logits in the thousands are off by some thousandths


def packed_hidden(hidden: Tensor, stored: str) -> dict[str, Tensor]:
    """Hidden states (n, H) as a record's columns: `hidden`, bytes (n, ·) uint8, and for fp8 `hidden_scale` (n,).

    fp8: a token's largest entry is the type's, 448; what is read back is the stored number times the scale.
    """
    if stored == "bfloat16":
        return {"hidden": hidden.bfloat16().contiguous().view(torch.uint8)}
    scale = hidden.float().abs().amax(-1) / LARGEST
    scale = torch.where(scale > 0, scale, 1.0)
    return {"hidden": (hidden.float() / scale[:, None]).to(STORED[stored]).view(torch.uint8), "hidden_scale": scale}


def unpacked_hidden(columns: dict[str, Tensor], stored: str) -> Tensor:
    """What `packed_hidden` stored: bf16, or fp32 of fp8 and its scales, (n, H)."""
    found = columns["hidden"].view(STORED[stored])
    return found if stored == "bfloat16" else found.float() * columns["hidden_scale"][:, None]


def check_kinds(schema: pyarrow.Schema, names: list[str], width: int, path: Path) -> None:
    """DataError for columns that are not there, or of other kinds than `logitless score` writes; width: of `hidden`.

    Lists of any length and of one are the same kind here.
    """
    import pyarrow as pa

    if missing := [name for name in names if name not in schema.names]:
        raise DataError(
            f"{path}: expected what logitless score writes, with --keep 1 or more or --store hidden, got no column "
            f"{', '.join(missing)}"
        )
    kinds = {"document": pa.int64(), "position": pa.int32(), "token": pa.int32(), "logsumexp": pa.float32()}
    kinds |= {"topk_ids": pa.list_(pa.int32()), "topk_logits": pa.list_(pa.float32())}
    kinds |= {"hidden": pa.binary(width), "hidden_scale": pa.float32()}
    for name in names:
        found = [schema.field(i).type for i in schema.get_all_field_indices(name)]
        plain = [pa.list_(kind.value_type) if pa.types.is_fixed_size_list(kind) else kind for kind in found]
        if plain != [kinds[name]]:
            got = " and ".join(map(str, found))
            raise DataError(f"{path}: expected a column {name} of {kinds[name]}, got one of {got}: score again")


def read_places(
    table: pyarrow.Table, before: tuple[int, int], entries: int, path: Path
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(document, position, token int64, whether it has a score) of each row, (n,). Raises DataError.

    before: document and position of the row above the first; entries: how many the vocabulary has.
    """
    scored = _scored(table, path)
    document, position, token = (table[name].to_numpy() for name in PLACES)
    step, further = np.diff(document, prepend=before[0]), np.diff(position, prepend=before[1])
    in_order = np.where(step == 0, further == 1, (step > 0) & (position == 0))
    _check(in_order, "documents in order, each with positions that count up from 0", path)
    _check((token >= 0) & (token < entries), f"tokens in 0..{entries - 1}", path)
    return document, position, token.astype(np.int64), scored


def read_hidden(table: pyarrow.Table, stored: str, path: Path) -> dict[str, Tensor]:
    """Which rows have a score, and the columns that `unpacked_hidden` takes, 0 in all others. Raises DataError."""
    scored = _scored(table, path)
    column: Any = table["hidden"].combine_chunks()
    width = column.type.byte_width
    values = np.frombuffer(column.buffers()[1], np.uint8, table.num_rows * width, column.offset * width)
    found = {"scored": scored, "hidden": np.where(scored[:, None], values.reshape(-1, width), np.uint8(0))}
    if stored == "fp8":
        found["hidden_scale"] = np.where(scored, table["hidden_scale"].to_numpy(), np.float32(1))
        _check(found["hidden_scale"] > 0, "hidden_scale above 0", path)
    tensors = {name: torch.from_numpy(x) for name, x in found.items()}
    _check(unpacked_hidden(tensors, stored).isfinite().all(-1).numpy(), "hidden states that are finite", path)
    return tensors


def read_best(table: pyarrow.Table, keep: int, entries: int, path: Path) -> dict[str, Tensor]:
    """Which rows have a score, and their best `keep` entries' `ids` and `log_weights`, 0 in all others: (n, keep).

    Raises DataError.
    """
    scored = _scored(table, path)
    ids, logits = (_lists(table, name, keep, scored, path) for name in ("topk_ids", "topk_logits"))
    in_order = np.sort(ids, -1)
    inside = (in_order[:, 0] >= 0) & (in_order[:, -1] < entries) & (np.diff(in_order) > 0).all(-1)
    _check(inside, f"best entries in 0..{entries - 1}, each once", path)
    log_weights = logits - table["logsumexp"].to_numpy()[scored, None]
    # the best K of V entries have K/V of the probability or more, and never more than all of it
    mass, least = torch.from_numpy(log_weights).logsumexp(-1).numpy(), math.log(keep / entries)
    right = (least - ROUNDING < mass) & (mass < ROUNDING)
    _check(right, f"best entries whose probabilities add up to {keep}/{entries}..1", path)
    found = {"ids": np.zeros((len(scored), keep), np.int64), "log_weights": np.zeros((len(scored), keep), np.float32)}
    found["ids"][scored], found["log_weights"][scored] = ids, log_weights
    return {name: torch.from_numpy(x) for name, x in ({"scored": scored} | found).items()}


def _lists(table: pyarrow.Table, name: str, keep: int, scored: np.ndarray, path: Path) -> np.ndarray:
    """A column of lists where rows have a score, (their number, keep). DataError for lists of other lengths."""
    import pyarrow as pa

    lists: Any = table[name].combine_chunks().filter(pa.array(scored))
    _check(lists.value_lengths().to_numpy(zero_copy_only=False) == keep, f"{keep} {name} in each row", path)
    return lists.flatten().to_numpy(zero_copy_only=False).reshape(-1, keep)


def _scored(table: pyarrow.Table, path: Path) -> np.ndarray:
    """Which rows have a score, (n,) bool. DataError where another column lacks a value that it must have."""
    scored = _filled(table["logsumexp"])
    for name in table.column_names:
        everywhere = name in PLACES
        expected = f"a {name}, not null, {'in each row' if everywhere else 'beside each logsumexp'}"
        _check(_filled(table[name]) | (~scored & (not everywhere)), expected, path)
    _check(np.isfinite(table["logsumexp"].to_numpy()) | ~scored, "each logsumexp finite or null", path)
    return scored


def _filled(column: pyarrow.ChunkedArray) -> np.ndarray:
    """Which rows have a value, and no null within it, (n,) bool."""
    import pyarrow as pa

    rows = column.is_valid().to_numpy().copy()
    lists: Any = column.combine_chunks()
    if pa.types.is_nested(lists.type):
        within = lists.flatten().is_null().to_numpy(zero_copy_only=False)
        rows[lists.value_parent_indices().to_numpy()[within]] = False
    return rows


def _check(right: np.ndarray, expected: str, path: Path) -> None:
    """DataError unless every row is as expected."""
    if wrong := int((~right).sum()):
        got = f"{wrong:,} of {plural(len(right), 'row')} otherwise"
        raise DataError(f"{path}: expected {expected}, got {got}: score again")
