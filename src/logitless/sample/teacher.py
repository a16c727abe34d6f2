"""A teacher's record as `logitless score` writes it, read at any row: its best entries, or its hidden states and head.

Hidden states are stored as bytes, a row each: bf16 as it is, or fp8 (e4m3) with one scale a token. What the columns
must hold, and how they are read, is in `columns`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor

from ..errors import ConfigError, DataError, NotFiniteError, OptionError, ShapeError, in_one_line, is_out_of_memory
from ..hashes import hash_of
from ..units import plural
from ..vocab.face import LMHead
from .columns import PLACES, STORED, check_kinds, read_best, read_hidden, read_places, unpacked_hidden

if TYPE_CHECKING:
    import pyarrow

OPTIONS = ("scale", "softcap", "vocab_size")  # of a head, beside its tensors
SAID = {"store": str, "vocab_size": int, "tokenizer": str, "text": str, "rows": int, "keep": int}  # of any record
SAID |= {"hidden_dtype": str, "hidden_size": int, "head": dict}
MOST_ENTRIES = 2**31  # of a record of an earlier version, which does not say how many there are
COLUMNS = {"topk": ["topk_ids", "topk_logits"], "bfloat16": ["hidden"], "fp8": ["hidden", "hidden_scale"]}
GROUPS_KEPT = 4  # row groups in memory: rows of a batch often share one


def write_head(path: Path, head: LMHead) -> dict[str, Any]:
    """Writes a head's tensors, adapters merged in; returns what a record says of it. Raises ConfigError, ImportError.

    The hash is of the file, whose bytes depend on the head alone.
    """
    from safetensors.torch import save_file

    weight = head.weight_tensor
    if weight is None:
        raise ConfigError("--store hidden: expected a floating point head, got a quantised one; dequantise it")
    for each in head.adapters:
        weight = weight + (each.scaling * each.b @ each.a).to(weight.dtype)
    tensors = {"weight": weight, "bias": head.bias}
    save_file({name: x.detach().cpu().contiguous() for name, x in tensors.items() if x is not None}, path)
    return {
        "file": path.name,
        "hash": hash_of(path),
        "scale": head.scale,
        "softcap": head.softcap,
        "vocab_size": head.vocab_size,
    }


@dataclass(frozen=True, eq=False)
class TeacherRows:
    """Some rows of a record, (n,) each: which of them have scores, and of these the teacher's distribution.

    Either `hidden` (n, H), what the teacher's head takes, or `ids` (n, K) int64 and `log_weights` (n, K) fp32, its best
    entries' log-probabilities. Rows without a score hold zeros.
    """

    scored: Tensor
    hidden: Tensor | None = None
    ids: Tensor | None = None
    log_weights: Tensor | None = None


class TeacherRecord:
    """A file that `logitless score` wrote, with one row a token; rows are read when they are asked for.

        record = TeacherRecord("teacher.parquet")
        rows = record.read(0, 512)
        loss = logitless.token_loss(
            lambda s: losses.forward_kl(s.reverse_kl), hidden, head, labels, want=("reverse_kl",),
            reference=(rows.hidden, record.head()),
        )

    kind: "hidden" (`--store hidden`) or "topk". tokenizer, text: hashes of the tokenizer and of the text it is of;
    opening: the ids before each document. Every page's checksum is compared as it is read, and the head's hash; rows
    that `logitless score` never writes, such as a null, a NaN or a document out of order, are refused then, too.
    Raises DataError for a file that is no such record, or damaged; ConfigError without pyarrow. Memory: row groups,
    of 8 MiB each where they hold hidden states.
    """

    def __init__(self, path: str | Path) -> None:
        try:
            import pyarrow.parquet as pq
        except ImportError:
            raise ConfigError("TeacherRecord: expected pyarrow, which is not installed; pip install pyarrow") from None
        self.path = Path(path)
        _check_file(self.path)
        with _explained(self.path):
            self.file = pq.ParquetFile(self.path, page_checksum_verification=True, memory_map=True)
        schema = self.file.schema_arrow
        self.about = about = _about(schema, self.path)
        self.kind: Literal["hidden", "topk"] = about.get("store", "topk")
        self.stored: str = about["hidden_dtype"] if self.kind == "hidden" else "topk"
        self.columns = ["logsumexp", *COLUMNS[self.stored]]
        width = about["hidden_size"] * STORED[self.stored].itemsize if self.kind == "hidden" else 0
        with _explained(self.path):  # names that are no text
            check_kinds(schema, [*PLACES, *self.columns], width, self.path)
        self.keep: int = about.get("keep") or 0
        self.vocab_size: int = about.get("vocab_size") or 0
        self.entries = self.vocab_size or MOST_ENTRIES
        if self.kind == "topk" and not 0 < self.keep <= self.entries:
            expected = f"metadata whose keep is within 1..{self.entries}"
            raise DataError(f"{path}: expected {expected}, got {self.keep}: score again")
        self.tokenizer, self.text = about.get("tokenizer"), about.get("text")
        self.opening = _opening(about)
        sizes = [self.file.metadata.row_group(i).num_rows for i in range(self.file.num_row_groups)]
        self.edges = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
        if (rows := about.get("rows")) not in (None, len(self)):
            raise DataError(f"{path}: expected {plural(rows, 'row')}, as were written, got {len(self):,}: score again")
        self.kept: dict[int, dict[str, Tensor]] = {}

    def __len__(self) -> int:
        """How many rows there are."""
        return int(self.edges[-1])

    @property
    def identity(self) -> str:
        """What tells this record from all others: a hash of its footer, which says where each column lies, and size."""
        size = self.path.stat().st_size
        with self.path.open("rb") as file:
            file.seek(max(0, size - 8))
            footer = int.from_bytes(file.read(4), "little") + 8
            file.seek(max(0, size - footer))
            return hash_of(file.read() + str(size).encode())

    @property
    def head_path(self) -> Path:
        """Where the teacher's head lies: beside the record."""
        return self.path.with_name((self.about.get("head") or {}).get("file", "no head"))

    def head(self) -> LMHead:
        """The teacher's head. Raises DataError for one that is not there, or not the record's."""
        path, about = self.head_path, self.about.get("head") or {}
        if not path.exists():
            raise DataError(f"{path} is not there: the head of {self.path}'s hidden states, which lies beside it")
        _check_file(path)
        if (found := hash_of(path)) != about.get("hash"):
            raise DataError(f"{path} has the hash {found}, expected {about.get('hash')}, of {self.path}'s own head")
        try:
            return _read_head(path, about, self.vocab_size, self.about["hidden_size"])
        except Exception as error:  # safetensors, LMHead and who takes what the metadata say
            if is_out_of_memory(error):
                raise
            why = in_one_line(error)
            raise DataError(f"{path}: expected the head of {self.path}, got another ({why}): score again") from None

    def documents(self) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """(its first row, its tokens (n,), which of them have scores (n,)) of each document in turn."""
        first, last = 0, (-1, -1)
        tokens: list[np.ndarray] = []
        scored: list[np.ndarray] = []
        for i in range(self.file.num_row_groups):
            table = self._table(i, [*PLACES, "logsumexp"])
            document, position, token, has = read_places(table, last, self.entries, self.path)
            for begin, end in pairwise(np.unique([0, *np.flatnonzero(position == 0), len(position)])):
                if position[begin] == 0 and tokens:
                    yield first, np.concatenate(tokens), np.concatenate(scored)
                    first, tokens, scored = int(self.edges[i] + begin), [], []
                tokens.append(token[begin:end])
                scored.append(has[begin:end])
                last = int(document[begin]), int(position[end - 1])
        if tokens:
            yield first, np.concatenate(tokens), np.concatenate(scored)

    def read(self, begin: int, end: int) -> TeacherRows:
        """The rows from begin to before end. Raises OptionError where there are no such rows."""
        if not 0 <= begin <= end <= len(self):
            raise OptionError(f"TeacherRecord.read: expected rows within 0..{len(self)}, got {begin}..{end}")
        edges = [min(row, len(self) - 1) for row in (begin, max(begin, end - 1))]
        first, last = (int(np.searchsorted(self.edges, row, side="right")) - 1 for row in edges)
        parts = []
        for i in range(first, last + 1):
            cut = slice(max(0, begin - int(self.edges[i])), max(0, end - int(self.edges[i])))
            parts.append({name: x[cut] for name, x in self._group(i).items()})
        columns = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        if self.kind == "hidden":
            return TeacherRows(columns["scored"], unpacked_hidden(columns, self.stored))
        return TeacherRows(columns["scored"], None, columns["ids"], columns["log_weights"])

    def _group(self, number: int) -> dict[str, Tensor]:
        """A row group's columns, kept for a while."""
        if number not in self.kept:
            while len(self.kept) >= GROUPS_KEPT:
                del self.kept[next(iter(self.kept))]
            table = self._table(number, self.columns)
            if self.kind == "hidden":
                self.kept[number] = read_hidden(table, self.stored, self.path)
            else:
                self.kept[number] = read_best(table, self.keep, self.entries, self.path)
        return self.kept[number]

    def _table(self, number: int, columns: list[str]) -> pyarrow.Table:
        with _explained(self.path):
            return self.file.read_row_group(number, columns=columns)


def _about(schema: pyarrow.Schema, path: Path) -> dict[str, Any]:
    """What a file says of the record that it is. Raises DataError."""
    try:
        about = json.loads((schema.metadata or {}).get(b"logitless", b"{}"))
    except (ValueError, RecursionError):
        about = None
    known = isinstance(about, dict) and all(type(about.get(x)) in (kind, type(None)) for x, kind in SAID.items())
    known = known and all(type(x) is int for x in _opening(about or {}))
    if not isinstance(about, dict) or not known or about.get("store", "topk") not in ("topk", "hidden"):
        raise DataError(f"{path}: expected the metadata that logitless score writes, got other: score again")
    entries = MOST_ENTRIES if about.get("vocab_size") is None else about["vocab_size"]
    if not all(0 <= x < entries <= MOST_ENTRIES for x in (0, *_opening(about))):
        got = f"{about.get('bos')} of {entries}"
        raise DataError(f"{path}: expected a bos of a vocabulary in the metadata, got {got}: score again")
    head = about.get("head") or {}
    file = Path(str(head.get("file")))
    whole = {"file", "hash", *OPTIONS} <= head.keys() and file.name == head["file"] and file.suffix == ".safetensors"
    wide = 0 < (about.get("hidden_size") or 0) < MOST_ENTRIES // 2
    if about.get("store") == "hidden" and not (whole and wide and about.get("hidden_dtype") in STORED):
        raise DataError(f"{path}: expected metadata that says which head and dtype its states are of: score again")
    return about


def _opening(about: dict[str, Any]) -> tuple[Any, ...]:
    """What the metadata call bos: an id, several, or null where nothing stands before a document."""
    bos = about.get("bos")
    return () if bos is None else (*bos,) if isinstance(bos, list) else (bos,)


def _read_head(path: Path, about: dict[str, Any], entries: int, width: int) -> LMHead:
    """The head that `write_head` wrote. Raises whatever reading another file does."""
    from safetensors.torch import load_file

    tensors = load_file(path)
    if not {"weight"} <= tensors.keys() <= {"weight", "bias"}:
        raise ShapeError(f"expected a weight, and a bias at most, got {', '.join(sorted(tensors)) or 'nothing'}")
    head = LMHead(tensors["weight"], tensors.get("bias"), **{name: about[name] for name in OPTIONS})
    if (head.rows, head.hidden_size) != (entries, width):
        raise ShapeError(f"expected {entries:,} entries of width {width:,}, got {head.rows:,} of {head.hidden_size:,}")
    if not all(torch.stack(x.aminmax()).isfinite().all() for x in tensors.values()):
        raise NotFiniteError("expected finite weights, got NaN or infinity")
    return head


def _check_file(path: Path) -> None:
    """DataError for a folder, and for what may never end, or wait for a writer forever."""
    if path.exists() and not path.is_file():
        raise DataError(f"{path}: expected a file, got a folder, a device or a pipe: score again")


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """DataError in the place of what pyarrow raises."""
    import pyarrow as pa

    try:
        yield
    except (OSError, pa.ArrowException, UnicodeDecodeError) as error:
        raise DataError(f"{path}: not a readable parquet file ({str(error).splitlines()[0]})") from None
