"""Part files of a run, one a block: whole or not there, so that a killed run goes on; at the end, one file."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ...errors import DataError, OptionError
from ...hashes import hash_of
from ..common.files import (
    arrow_file,
    read_object,
    readable,
    remove_leftovers,
    remove_whole,
    write_json,
    write_table,
    write_text,
    write_whole,
)
from ..common.lock import LOCK_FILE, acquire, holder, release
from ..common.sealed import together
from ..common.written import PARTS_MANIFEST
from .block import PLACES, Scored
from .config import parts_of

KEY = b"logitless"  # of the files' metadata
GROUP = 8 << 20  # bytes of the rows that are written, and read, together, where they are wide
NO_SUMS = ("document", "name", "why")  # of what is known of a piece
WRITING: dict[str, Any] = {"compression": "zstd", "use_dictionary": False, "write_page_checksum": True}


@dataclass(frozen=True)
class Parts:
    """The directory beside the file to write, with a part for each block that is done."""

    place: Path

    @property
    def folder(self) -> Path:
        return parts_of(self.place)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """The folder as this process's own while it lasts. Raises OptionError where another one writes there."""
        while True:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
            except FileExistsError:
                what = f"{self.folder}, where its parts would lie, is no folder"
                raise OptionError(f"--out {self.place}: {what}: remove it, or choose another") from None
            with suppress(FileNotFoundError):  # whoever had it has ended, and has taken it away
                if acquire(self.folder):
                    break
                who = holder(self.folder)
                raise OptionError(f"--out {self.place}: {who} is writing it: wait for its end, or choose another")
        try:
            yield
        finally:
            with suppress(OSError):  # that it is gone
                if {path.name for path in self.folder.iterdir()} <= {PARTS_MANIFEST, LOCK_FILE}:  # nothing is done yet
                    (self.folder / PARTS_MANIFEST).unlink()
            release(self.folder)
            with suppress(OSError):  # that it holds parts, or is gone
                self.folder.rmdir()

    def open(self, manifest: dict[str, Any], outputs: Iterable[Path]) -> bool:
        """Begins, or goes on with, a run of these options, `locked`; whether there was one. Raises OptionError.

        outputs: what --out stands for, of which nothing may be there before a run begins.
        """
        path = self.folder / PARTS_MANIFEST
        if os.path.lexists(path):
            self._check_same(self.manifest, manifest)
            return True
        if there := [str(output) for output in outputs if output.exists()]:
            remove_leftovers(self.folder)  # of a run that was killed at its very end
            exist, them = ("exists", "it") if len(there) == 1 else ("exist", "them")
            raise OptionError(f"--out {', '.join(there)} {exist} already: remove {them}, or choose another")
        write_json(path, manifest)
        return False

    def _check_same(self, before: dict[str, Any], now: dict[str, Any]) -> None:
        for name in {**before, **now}:
            was, is_now = (x.get(name, "absent") for x in (before, now))
            if was != is_now:
                raise OptionError(
                    f"{self.folder} holds an unfinished run with {name} {was}, now {is_now}: give the same, "
                    "remove it, or choose another --out"
                )

    def part(self, number: int) -> Path:
        return self.folder / f"{number:08d}.parquet"

    def write(self, number: int, block: Scored) -> None:
        """A block's part, whole or not at all."""
        table = _table(block).replace_schema_metadata({KEY: json.dumps(block.pieces)})
        write_whole(self.part(number), lambda path: write_table(path, table, **WRITING))
        write_text(self._seal(number), self._hash(number))

    def whole(self, number: int) -> bool | None:
        """Whether a part is there, this run's of this number, and what was written; None where there is none."""
        path, seal = self.part(number), self._seal(number)
        if not any(map(os.path.lexists, (path, seal))):  # a symlink that leads nowhere is there
            return None
        try:
            with readable(path), readable(seal):
                return seal.read_text("utf-8") == self._hash(number)
        except DataError:
            return False

    def discard(self, number: int) -> None:
        """Takes a part away, whatever lies in its place."""
        for path in filter(os.path.lexists, (self.part(number), self._seal(number))):
            remove_whole(path)

    def _seal(self, number: int) -> Path:
        """Where a part's hash stands."""
        return self.part(number).with_suffix(".hash")

    def _hash(self, number: int) -> str:
        """What tells a part from those of other runs, of other numbers and of other contents."""
        return together((hash_of((self.folder / PARTS_MANIFEST).read_bytes()), str(number), hash_of(self.part(number))))

    @property
    def manifest(self) -> dict[str, Any]:
        """What the run's parts have in common."""
        return read_object(self.folder / PARTS_MANIFEST, f"remove {self.folder} to begin anew, or choose another --out")

    def merge(self, count: int, metadata: dict[str, Any], of_document: Callable[[dict[str, Any]], None]) -> None:
        """The file, whole or not at all, from `count` parts; `of_document` gets what is known of each in turn."""

        def write(path: Path) -> None:
            with ExitStack() as stack:
                writer = None
                for table in self._tables(count, of_document):
                    if writer is None:
                        about = json.dumps({**metadata, "rows": self._rows(count)})
                        schema = table.schema.with_metadata({KEY: about, "vocab_size": str(metadata["vocab_size"])})
                        file = stack.enter_context(arrow_file(path, "wb"))
                        writer = stack.enter_context(pq.ParquetWriter(file, schema, **WRITING))
                    if table.num_rows:
                        writer.write_table(table, row_group_size=max(1, GROUP * table.num_rows // table.nbytes))

        write_whole(self.place, write)

    def _rows(self, count: int) -> int:
        """How many rows there are in all parts, so that readers miss those that are lost later."""
        return sum(pq.read_metadata(arrow_file(self.part(number))).num_rows for number in range(count))

    def _tables(self, count: int, of_document: Callable[[dict[str, Any]], None]) -> Iterator[pa.Table]:
        """The parts' rows, with positions that count from the document's first token."""
        open_: dict[str, Any] | None = None
        for number in range(count):
            table, pieces = _read(self.part(number))
            position, row = table["position"].to_numpy().copy(), 0
            for piece in pieces:
                if open_ is not None and open_["document"] == piece["document"]:
                    position[row : row + piece["rows"]] += open_["rows"]
                    sums = {name: open_[name] + x for name, x in piece.items() if name not in NO_SUMS}
                    open_ = {**piece, **open_, **sums}
                else:
                    if open_ is not None:
                        of_document(open_)
                    open_ = piece
                row += piece["rows"]
            yield table.set_column(table.schema.get_field_index("position"), "position", pa.array(position))
        if open_ is not None:
            of_document(open_)

    def remove(self) -> None:
        """Takes away the parts, and what was left of a file that a killed run had begun to merge."""
        remove_whole(self.folder)
        remove_leftovers(self.place)


def _table(block: Scored) -> pa.Table:
    """The rows as an arrow table; null where a token has no score. Two dimensions of uint8 are bytes, a row each."""
    unscored = ~block.scored
    arrays = {}
    for name, x in block.columns.items():
        mask = None if name in PLACES else unscored
        if x.ndim == 2 and x.dtype == np.uint8:
            valid, buffer = pa.array(block.scored).buffers()[1], pa.py_buffer(np.ascontiguousarray(x))
            arrays[name] = pa.Array.from_buffers(pa.binary(x.shape[1]), len(x), [valid, buffer])
        elif x.ndim == 2:  # of any length, as far as the file says: before 26, pyarrow reads no null of a fixed one
            ends = np.concatenate([[0], np.cumsum(block.scored * x.shape[1])]).astype(np.int32)
            begins = pa.array(ends, mask=np.append(unscored, False))
            arrays[name] = pa.ListArray.from_arrays(begins, pa.array(x[block.scored].reshape(-1)))
        else:
            arrays[name] = pa.array(x, mask=mask)
    return pa.table(arrays)


def _read(path: Path) -> tuple[pa.Table, list[dict[str, Any]]]:
    """A part's rows and what is known of its pieces; every page's checksum is compared."""
    with pq.ParquetFile(arrow_file(path), page_checksum_verification=True) as file:
        return file.read().replace_schema_metadata(None), json.loads(file.schema_arrow.metadata[KEY])
