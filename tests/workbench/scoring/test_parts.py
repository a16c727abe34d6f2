"""What a killed run left, changed since: refused in one line, or scored again."""

import json
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from logitless.errors import LogitlessError, OptionError
from logitless.workbench.common.written import PARTS_MANIFEST
from logitless.workbench.runs.ending import Interrupted
from logitless.workbench.scoring import run as scoring
from logitless.workbench.scoring.parts import KEY
from tests.support.workbench.damage import JSON
from tests.workbench.scoring.conftest import config, corpus


@pytest.fixture
def stopped(micro, tmp_path, small_blocks, monkeypatch):
    """Options of a run that was stopped when all its parts were there."""
    options = config(micro, corpus(tmp_path / "a.jsonl", 8), tmp_path / "a.parquet")
    with monkeypatch.context() as patch:
        patch.setattr(scoring, "conclude", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(Interrupted):
            scoring.run(options)
    return options


def test_a_manifest_in_whose_place_anything_lies(stopped, tmp_path):
    parts, kept = tmp_path / "a.parquet.parts", tmp_path / "kept"
    shutil.copytree(parts, kept)
    contents = [json.dumps(x) for x in ({}, {"schema": None}, {"the tokenizer": 5})]
    for change in [*JSON.values(), _leads_nowhere, *(lambda path, x=x: path.write_text(x) for x in contents)]:
        change(parts / PARTS_MANIFEST)
        with pytest.raises(LogitlessError, match=f"{parts}.*remove") as caught:
            scoring.run(stopped)
        assert "\n" not in str(caught.value)
        shutil.rmtree(parts)
        shutil.copytree(kept, parts)


def test_what_a_kill_at_the_very_end_left_is_taken_away(stopped, tmp_path):
    """All outputs are whole there, and the parts were being removed."""
    scoring.run(stopped)
    left = tmp_path / ".a.parquet.parts.abc.tmp"
    (left / "a.parquet.parts").mkdir(parents=True)
    with pytest.raises(OptionError, match="exists already: remove it"):
        scoring.run(stopped)
    assert not left.exists()


def test_parts_that_no_folder_holds(stopped, tmp_path):
    parts = tmp_path / "a.parquet.parts"
    shutil.rmtree(parts)
    parts.write_text("x")
    for change in (lambda path: None, _leads_nowhere):
        change(parts)
        with pytest.raises(OptionError, match=f"--out .*: {parts}, where its parts would lie, is no folder: remove"):
            scoring.run(stopped)


def _pieces(path: Path) -> None:
    """Another count of rows than there are."""
    table = pq.read_table(path)
    about = {**table.schema.metadata, KEY: json.dumps([{"document": 0, "name": "x", "rows": 1}])}
    pq.write_table(table.replace_schema_metadata(about), path, write_page_checksum=True)


def _other_scores(path: Path) -> None:
    """As whole and as well-formed as what was written."""
    table = pq.read_table(path)
    place = table.schema.get_field_index("logprob")
    doubled = pa.array([x and 2 * x for x in table["logprob"].to_pylist()], pa.float32())
    pq.write_table(table.set_column(place, table.schema.field(place), doubled), path, write_page_checksum=True)


def _another_parts_place(path: Path) -> None:
    """Both parts whole, with what goes with them, each in the other's place."""
    for first in (path, path.with_suffix(".hash")):
        second = first.with_stem("00000001")
        first.rename(path.parent / "kept")
        second.rename(first)
        (path.parent / "kept").rename(second)


def _no_hash(path: Path) -> None:
    path.with_suffix(".hash").unlink()


def _another_hash(path: Path) -> None:
    path.with_suffix(".hash").write_bytes(b"\xff")


def _deep(path: Path) -> None:
    table = pq.read_table(path)
    pq.write_table(table.replace_schema_metadata({**table.schema.metadata, KEY: "[" * 100_000}), path)


def _leads_nowhere(path: Path) -> None:
    path.unlink()
    path.symlink_to("/nowhere/at/all")


def _hash_leads_nowhere(path: Path) -> None:
    _leads_nowhere(path.with_suffix(".hash"))


def _hash_is_a_pipe(path: Path) -> None:
    path.unlink()
    JSON["a pipe"](path.with_suffix(".hash"))


def _hash_is_a_folder(path: Path) -> None:
    JSON["a folder"](path.with_suffix(".hash"))


LINKS = (_leads_nowhere, _hash_leads_nowhere, _hash_is_a_pipe, _hash_is_a_folder)


def test_parts_in_whose_place_anything_lies_are_scored_again(stopped, tmp_path):
    part, kept = tmp_path / "a.parquet.parts" / "00000000.parquet", tmp_path / "kept"
    shutil.copytree(part.parent, kept)
    scoring.run(stopped)
    whole = stopped.place.read_bytes()
    changes = {x.__name__: x for x in (_pieces, _deep, _other_scores, _another_parts_place, _no_hash, _another_hash)}
    changes |= {x.__name__: x for x in LINKS}
    for kind, change in {**JSON, **changes}.items():
        stopped.place.unlink()
        shutil.copytree(kept, part.parent)
        change(part)
        scoring.run(stopped)
        assert stopped.place.read_bytes() == whole, kind
