"""A teacher's record as `logitless score` writes it, read at any row: its best entries, or its hidden states and head.

Hidden states are stored as bytes, a row each: bf16 as it is, or fp8 (e4m3) with one scale a token.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor

from ..errors import ConfigError, DataError
from ..vocab.face import LMHead

if TYPE_CHECKING:
    import pyarrow

STORED = {"bfloat16": torch.bfloat16, "fp8": torch.float8_e4m3fn}  # how hidden states may be stored
LARGEST = torch.finfo(torch.float8_e4m3fn).max
OPTIONS = ("scale", "softcap", "vocab_size")  # of a head, beside its tensors
SAID = {"store": str, "vocab_size": int, "tokenizer": str, "text": str, "bos": int, "hidden_dtype": str, "head": dict}
MOST_OF_LOGPROB = 0.1  # of float32 logits in the thousands, whose rounding is some thousandths
MOST_ENTRIES = 2**31  # of a record of an earlier version, which does not say how many there are
GROUPS_KEPT = 4  # row groups in memory: rows of a batch often share one


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
        "hash": file_hash(path),
        "scale": head.scale,
        "softcap": head.softcap,
        "vocab_size": head.vocab_size,
    }


def file_hash(path: Path) -> str:
    """What tells a file's content from all others."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


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

    kind: "hidden" (`--store hidden`) or "topk". tokenizer, text: hashes of the tokenizer and of the text it is of; bos:
    the id before each document, or None. Every page's checksum is compared as it is read, and the head's hash.
    Raises DataError for a file that is no such record, or damaged; ConfigError without pyarrow. Memory: row groups,
    of 8 MiB each where they hold hidden states.
    """

    def __init__(self, path: str | Path) -> None:
        try:
            import pyarrow.parquet as pq
        except ImportError:
            raise ConfigError("TeacherRecord: expected pyarrow, which is not installed; pip install pyarrow") from None
        self.path = Path(path)
        with _explained(self.path):
            self.file = pq.ParquetFile(self.path, page_checksum_verification=True, memory_map=True)
        schema = self.file.schema_arrow
        about = _about(schema, self.path)
        self.kind: Literal["hidden", "topk"] = about.get("store", "topk")
        what = ["hidden"] if self.kind == "hidden" else ["topk_ids", "topk_logits"]
        needed = ["document", "token", "logsumexp", *what]
        if missing := [name for name in needed if name not in schema.names]:
            raise DataError(
                f"{path}: expected what logitless score writes, with --keep 1 or more or --store hidden, got no column "
                f"{', '.join(missing)}"
            )
        _check_kinds(schema, needed, self.path)
        self.columns = [*needed[2:], *(["hidden_scale"] if "hidden_scale" in schema.names else [])]
        self.about: dict[str, Any] = about
        self.vocab_size: int = about.get("vocab_size", 0)
        self.tokenizer, self.text, self.bos = about.get("tokenizer"), about.get("text"), about.get("bos")
        sizes = [self.file.metadata.row_group(i).num_rows for i in range(self.file.num_row_groups)]
        self.edges = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
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
            return hashlib.blake2b(file.read() + str(size).encode(), digest_size=16).hexdigest()

    @property
    def head_path(self) -> Path:
        """Where the teacher's head lies: beside the record."""
        return self.path.with_name((self.about.get("head") or {}).get("file", "no head"))

    def head(self) -> LMHead:
        """The teacher's head. Raises DataError for one that is not there, or not the record's."""
        from safetensors.torch import load_file

        path, about = self.head_path, self.about.get("head") or {}
        if not path.exists():
            raise DataError(f"{path} is not there: the head of {self.path}'s hidden states, which lies beside it")
        if (found := file_hash(path)) != about.get("hash"):
            raise DataError(f"{path} has the hash {found}, expected {about.get('hash')}, of {self.path}'s own head")
        tensors = load_file(path)
        return LMHead(tensors["weight"], tensors.get("bias"), **{name: about[name] for name in OPTIONS})

    def documents(self) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """(its first row, its tokens (n,), which of them have scores (n,)) of each document in turn."""
        first, number = 0, None
        tokens: list[np.ndarray] = []
        scored: list[np.ndarray] = []
        row = 0
        for i in range(self.file.num_row_groups):
            table = self._table(i, ["document", "token", "logsumexp"])
            document, token = table["document"].to_numpy(), table["token"].to_numpy().astype(np.int64)
            has = np.isfinite(table["logsumexp"].to_numpy().astype(np.float64))
            for part in np.split(np.arange(len(document)), np.flatnonzero(np.diff(document)) + 1):
                if len(part) and document[part[0]] != number:
                    if tokens:
                        yield first, np.concatenate(tokens), np.concatenate(scored)
                    first, number, tokens, scored = row, document[part[0]], [], []
                tokens.append(token[part])
                scored.append(has[part])
                row += len(part)
        if tokens:
            yield first, np.concatenate(tokens), np.concatenate(scored)

    def read(self, begin: int, end: int) -> TeacherRows:
        """The rows begin..end."""
        first, last = (int(np.searchsorted(self.edges, row, side="right")) - 1 for row in (begin, max(begin, end - 1)))
        parts = []
        for i in range(first, last + 1):
            cut = slice(max(0, begin - int(self.edges[i])), max(0, end - int(self.edges[i])))
            parts.append({name: x[cut] for name, x in self._group(i).items()})
        columns = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        if self.kind == "hidden":
            return TeacherRows(columns["scored"], unpacked_hidden(columns, self.about["hidden_dtype"]))
        return TeacherRows(columns["scored"], None, columns["topk_ids"], columns["log_weights"])

    def _group(self, number: int) -> dict[str, Tensor]:
        """A row group's columns, kept for a while."""
        if number not in self.kept:
            while len(self.kept) >= GROUPS_KEPT:
                del self.kept[next(iter(self.kept))]
            self.kept[number] = _tensors(self._table(number, self.columns))
            self._check_best(**self.kept[number])
        return self.kept[number]

    def _check_best(self, topk_ids: Tensor | None = None, log_weights: Tensor | None = None, **_: Tensor) -> None:
        """DataError for best entries that are none of the vocabulary, or more probable than all together."""
        if topk_ids is None or log_weights is None or not topk_ids.numel():
            return
        entries = self.vocab_size or MOST_ENTRIES
        if topk_ids.min() < 0 or topk_ids.max() >= entries or not log_weights.max() < MOST_OF_LOGPROB:
            raise DataError(f"{self.path}: expected entries with probabilities up to 1, got others: score again")

    def _table(self, number: int, columns: list[str]) -> pyarrow.Table:
        with _explained(self.path):
            return self.file.read_row_group(number, columns=columns)


def _about(schema: pyarrow.Schema, path: Path) -> dict[str, Any]:
    """What a file says of the record that it is. Raises DataError."""
    try:
        about = json.loads((schema.metadata or {}).get(b"logitless", b"{}"))
    except (ValueError, RecursionError):
        about = None
    known = isinstance(about, dict) and all(isinstance(about.get(x), kind | None) for x, kind in SAID.items())
    if not isinstance(about, dict) or not known or about.get("store", "topk") not in ("topk", "hidden"):
        raise DataError(f"{path}: expected the metadata that logitless score writes, got other: score again")
    head = about.get("head") or {}
    whole = {"file", "hash", *OPTIONS} <= head.keys() and Path(str(head["file"])).name == head["file"]
    if about.get("store") == "hidden" and not (whole and about.get("hidden_dtype") in STORED):
        raise DataError(f"{path}: expected metadata that says which head and dtype its states are of: score again")
    return about


def _check_kinds(schema: pyarrow.Schema, names: list[str], path: Path) -> None:
    """DataError for columns of other kinds than `logitless score` writes."""
    from pyarrow import types

    for name in names:
        kind = schema.field(name).type
        number = kind.value_type if types.is_fixed_size_list(kind) else kind
        right = types.is_fixed_size_binary if name == "hidden" else types.is_integer
        if name in ("logsumexp", "topk_logits"):
            right = types.is_floating
        if not right(number) or types.is_fixed_size_list(kind) != name.startswith("topk"):
            raise DataError(f"{path}: expected what logitless score writes, got a column {name} of {kind}")


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """DataError in the place of what pyarrow raises."""
    import pyarrow as pa

    try:
        yield
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{path}: not a readable parquet file ({str(error).splitlines()[0]})") from None


def _tensors(table: pyarrow.Table) -> dict[str, Tensor]:
    """A row group's columns, zero where a token has no score."""
    logsumexp = table["logsumexp"].to_numpy().astype(np.float32)
    scored = np.isfinite(logsumexp)
    found = {"scored": scored}
    if "hidden" in table.column_names:
        bytes_: Any = table["hidden"].combine_chunks()
        width = bytes_.type.byte_width
        values = np.frombuffer(bytes_.buffers()[1], np.uint8, table.num_rows * width, bytes_.offset * width)
        found["hidden"] = np.where(scored[:, None], values.reshape(-1, width), np.uint8(0))
        if "hidden_scale" in table.column_names:
            found["hidden_scale"] = np.nan_to_num(table["hidden_scale"].to_numpy().astype(np.float32))
    else:
        lists = {name: table[name].combine_chunks() for name in ("topk_ids", "topk_logits")}
        ids, logits = (x.values.to_numpy(zero_copy_only=False).reshape(table.num_rows, -1) for x in lists.values())
        found["topk_ids"] = np.where(scored[:, None], ids, 0).astype(np.int64)
        found["log_weights"] = np.where(scored[:, None], logits - logsumexp[:, None], 0.0).astype(np.float32)
    return {name: torch.from_numpy(np.ascontiguousarray(x)) for name, x in found.items()}
