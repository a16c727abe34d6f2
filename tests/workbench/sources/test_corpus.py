"""Where documents come from, and one line for everything they cannot come from."""

import errno
import json
import os

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset, DatasetDict

from logitless.errors import DataError
from logitless.workbench.common.files import write_json
from logitless.workbench.common.written import no_text_beside
from logitless.workbench.scoring.documents import Documents
from logitless.workbench.sources.corpus import chat_columns, documents, standard_library, table
from logitless.workbench.sources.identity import text_files
from tests.support.workbench.damage import not_utf8


def read(path) -> list[str]:
    return list(documents(str(path))[0])


def test_the_standard_library_is_a_corpus():
    texts = list(standard_library())
    assert 8e6 < sum(map(len, texts)) < 20e6
    assert texts == list(standard_library())
    assert any("class Thread" in text for text in texts)
    assert not any("site-packages/torch" in text[:200] for text in texts)


def test_a_text_file_is_one_document(tmp_path):
    (tmp_path / "a.txt").write_text("größer\n", encoding="utf-8")
    assert read(tmp_path / "a.txt") == ["größer\n"]


def test_a_folder_holds_documents_of_every_kind(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "b.txt").write_text("two")
    (tmp_path / "a.md").write_text("one")
    (tmp_path / "c.jsonl").write_text('{"text": "three"}\n')
    (tmp_path / "sub" / "d.py").write_text("four")
    (tmp_path / "e.bin").write_bytes(b"\xff\x00\xfe")
    (tmp_path / ".hidden").write_text("no")
    (tmp_path / "empty.txt").write_text("")
    assert read(tmp_path) == ["one", "two", "three", "four"]


def test_what_runs_write_is_no_document(tmp_path):
    """Not where a run has just begun or was killed, nor beside the text; what else lies there or is called so is."""
    begun, ended, other, parts = (tmp_path / name for name in ("begun", "deep/ended", "other", "a.parquet.parts"))
    for folder in (begun / "model", ended / "start", other, parts):
        folder.mkdir(parents=True)
    (begun / "run.lock").write_text("process 1 on here")
    write_json(ended / "run.json", {"schema": 2})
    write_json(parts / "manifest.json", {"schema": 4})
    for written in (
        begun / "model/config.json",
        ended / "metrics.jsonl",
        ended / "start/config.json",
        parts / "0.hash",
    ):
        written.write_text("written")
    (begun / "a.txt").write_text("one")
    (other / "run.json").write_text('{\n  "schema": "two"')
    (other / "run.lock").write_text("three")
    (tmp_path / "metrics.jsonl").write_text('{"text": "four"}')
    documents = [begun / "a.txt", tmp_path / "metrics.jsonl", other / "run.json", other / "run.lock"]
    assert read(tmp_path) == ["one", "four", '{\n  "schema": "two"', "three"]
    assert text_files(tmp_path) == Documents(tmp_path, 4).files == documents
    (tmp_path / "run.lock").write_text("process 2 on here")  # of a run that writes into this very folder
    del documents[1]
    assert text_files(tmp_path) == documents
    (tmp_path / "run.lock").unlink()
    assert no_text_beside(tmp_path / "run.lock") == ()  # given back after the folder was listed


def test_what_is_written_through_a_link_is_no_document(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    (corpus / "a.txt").write_text("one")
    (corpus / "out.txt").symlink_to(tmp_path / "elsewhere/out.txt")
    (corpus / "out.txt").write_text("written")
    assert text_files(corpus, (corpus / "out.txt",)) == [corpus / "a.txt"]
    (tmp_path / "link").symlink_to(corpus)
    assert text_files(tmp_path / "link", (corpus / "a.txt",)) == [tmp_path / "link/out.txt"]


def test_jsonl_and_parquet(tmp_path):
    rows = ["one", "two\nlines", "three"]
    (tmp_path / "a.jsonl").write_text(
        "\n".join(json.dumps({"id": i, "content": t}) for i, t in enumerate(rows)) + "\n\n"
    )
    pq.write_table(pa.table({"id": [1, 2, 3], "text": rows}), tmp_path / "a.parquet")
    assert read(tmp_path / "a.jsonl") == rows
    assert read(tmp_path / "a.parquet") == rows


def test_a_datasets_directory_and_its_splits(tmp_path):
    Dataset.from_dict({"text": ["a", "b"]}).save_to_disk(tmp_path / "one")
    splits = {"train": Dataset.from_dict({"text": ["a"]}), "test": Dataset.from_dict({"text": ["b", "c"]})}
    DatasetDict(splits).save_to_disk(tmp_path / "two")
    assert read(tmp_path / "one") == ["a", "b"]
    train, held_out = documents(str(tmp_path / "two"))
    assert (list(train), list(held_out or [])) == (["a"], ["b", "c"])


def test_what_is_left_out_is_said(tmp_path):
    """Rows of null and files that are no text were passed over without a word."""
    path = tmp_path / "data"
    path.mkdir()
    pq.write_table(pa.table({"text": ["a", None, "b", None, ""]}), path / "a.parquet")
    (path / "b.gz").write_bytes(b"\x1f\x8b\xff")
    (path / "c.txt").write_text("c")
    told: list[str] = []
    assert list(documents(str(path), told.append)[0]) == ["a", "b", "", "c"]
    rows, files = f"{path}/a.parquet: 2 of 5 rows without text (null): left out", "1 file that is not UTF-8 text"
    assert told == [rows, f"{path}: {files}: left out"]
    Dataset.from_dict({"text": ["a", None]}).save_to_disk(tmp_path / "set")
    assert list(documents(str(tmp_path / "set"), told.append)[0]) == ["a"]
    assert told[2:] == [f"{tmp_path}/set: 1 of 2 rows without text (null): left out"]


BAD = {
    "a.jsonl": ('{"text": "a"}\n{"text": ', "a.jsonl:2: not JSON"),
    "b.jsonl": ("[1]\n", "b.jsonl:1: expected an object"),
    "c.jsonl": ('{"words": "a"}\n', "c.jsonl:1: expected a field named text or content, got words"),
    "chats.jsonl": ('{"text": "a"}\n{"messages": []}\n', "chats.jsonl:2: .*got messages; conversations are read"),
    "d.jsonl": ('{"text": 3}\n', "d.jsonl:1: field 'text' must be text, got int"),
    "e.jsonl": (b"\xff\xfe\x00", "e.jsonl: not UTF-8"),
    "half.jsonl": ('{"text": "\\ud83d\\ude00"}\n{"text": "a \\uD83D b"}\n', "half.jsonl:2: .*half of a surrogate pair"),
    "deep.jsonl": ("[" * 100_000, "deep.jsonl:1: not JSON"),
    "f.parquet": ("text", "f.parquet: not a readable parquet file"),
    "g.txt": (b"\xff\xfe\x00", "g.txt: not UTF-8 text"),
}


@pytest.mark.parametrize("name", BAD)
def test_one_line_for_a_bad_file(tmp_path, name):
    content, message = BAD[name]
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError, match=message) as caught:
        read(path)
    assert "\n" not in str(caught.value)


def test_endings_in_capitals_are_the_same(tmp_path):
    """As one text, a file of records would be learned and scored with its braces."""
    path = tmp_path / "A.JSONL"
    path.write_text('{"text": "a"}\n{"text": "b"}\n')
    pq.write_table(pa.table({"text": ["c"]}), tmp_path / "B.PARQUET")
    assert read(tmp_path) == ["a", "b", "c"]
    assert read(path) == ["a", "b"]
    found = table(str(path))
    assert found is not None
    assert list(found[0]) == [{"text": "a"}, {"text": "b"}]
    assert [piece.text for piece in Documents(tmp_path, context=8)] == ["a", "b", "c"]


@pytest.mark.parametrize(
    "content", ['[\n {"text": "a"}\n]', '{"messages": []}\n{"messages": []}\n', '\ufeff[{"a": 1}, ']
)
def test_rows_in_a_json_file_are_no_text(tmp_path, content):
    """They would be learned and scored with their braces."""
    path = tmp_path / "rows.JSON"
    path.write_text(content)
    for reads in (read, lambda path: Documents(path, context=8)):
        with pytest.raises(DataError, match=r"rows.JSON: expected a text, got JSON objects, .* from .jsonl files"):
            reads(path)
    assert read(tmp_path) == [content.removeprefix("\ufeff")]  # as code is, a file of a folder is text


@pytest.mark.parametrize("ending", ["csv", "TSV"])
def test_a_table_of_another_format_is_no_text(tmp_path, ending):
    """Its column's name and its other columns would be learned and scored."""
    path = tmp_path / f"rows.{ending}"
    path.write_text("text,label\nhello,1\n")
    for reads in (read, lambda path: Documents(path, context=8)):
        with pytest.raises(DataError, match=rf"rows.{ending}: expected a text, got a table, .* from .parquet"):
            reads(path)
    assert read(tmp_path) == [path.read_text()]  # a file of a folder is text


@pytest.mark.parametrize("content", ['{"text": "a"}', "[1, 2]", "[", "{}, so it goes", "[" * 100_000])
def test_other_json_files_are_text(tmp_path, content):
    path = tmp_path / "a.json"
    path.write_text(content)
    assert read(path) == [piece.text for piece in Documents(path, context=8)] == [content]


def test_a_folder_of_conversations_is_told_where_they_are_read_from(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    with pytest.raises(DataError, match=r"a.jsonl:1: .*got prompt, completion; conversations are read from one .jsonl"):
        read(tmp_path)


@pytest.mark.parametrize("kind", ["parquet", "directory"])
def test_text_that_is_no_utf8(tmp_path, kind):
    """Arrow reads it, and raises where Python wants it."""
    path, rows = tmp_path / f"a.{kind}", pa.table({"text": not_utf8(3)})
    if kind == "parquet":
        pq.write_table(rows, path)
    else:
        Dataset(rows).save_to_disk(path)
    found = table(str(path))
    assert found is not None
    for rows in (documents(str(path))[0], found[0]):
        with pytest.raises(DataError, match=f"--data {path}: expected text in UTF-8, got other bytes; write it in"):
            list(rows)


@pytest.mark.parametrize("kind", ["parquet", "directory"])
def test_dates_that_python_does_not_have(tmp_path, kind):
    """Milliseconds that were taken for seconds: beside text nobody reads them, in its place they are one line."""
    path, far = tmp_path / f"a.{kind}", pa.array([10**13]).cast(pa.timestamp("s"))

    def write(rows: pa.Table) -> str:
        if kind == "parquet":
            pq.write_table(rows, path)
        else:
            Dataset(rows).save_to_disk(path)
        return str(path)

    data = write(pa.table({"text": ["a"], "prompt": ["b"], "when": far}))
    assert table(data, chat_columns) is None
    assert list(documents(data)[0]) == ["a"]
    data = write(pa.table({"prompt": ["a"], "completion": ["b"], "when": far}))
    found = table(data, chat_columns)
    assert found is not None
    assert list(found[0]) == [{"prompt": "a", "completion": "b"}]
    assert [piece.chat for piece in Documents(path, context=8)] == [{"prompt": "a", "completion": "b"}]
    found = table(data)
    assert found is not None
    with pytest.raises(DataError, match=f"--data {path}: not a readable .* .date value out of range"):
        list(found[0])
    with pytest.raises(DataError, match=f"--data {path}: not a readable .* .date value out of range"):
        list(documents(write(pa.table({"text": far})))[0])


def test_a_time_zone_that_is_not_known(tmp_path):
    """pyarrow says that a module must be installed, which is."""
    pq.write_table(pa.table({"text": pa.array([0], pa.timestamp("s", tz="Mars/Olympus"))}), tmp_path / "a.parquet")
    said = "a time zone that is not known here; write the times in another, or pip install tzdata"
    with pytest.raises(DataError, match=rf"a.parquet: not a readable parquet file \({said}\)"):
        read(tmp_path / "a.parquet")
    assert [piece.problem for piece in Documents(tmp_path / "a.parquet", context=8)] == [said]


def test_lines_end_as_anywhere(tmp_path):
    """Of a CR alone, `train` made an end of a line and `score` none."""
    path, lines = tmp_path / "a.jsonl", ['{"text": "one"}', "", '{"text": "two"}', '{"text": "three"}']
    for end in ("\r", "\n", "\r\n"):
        path.write_text(end.join(lines), newline="")
        pieces = list(Documents(path, context=8))
        assert [piece.text for piece in pieces] == read(path) == ["one", "two", "three"]
        assert [piece.name for piece in pieces] == [f"{path}:{number}" for number in (1, 3, 4)]


def test_splits_without_rows(tmp_path):
    """`datasets` writes them, and cannot read them."""
    some = Dataset.from_dict({"text": ["a"]})
    some.select([]).save_to_disk(tmp_path / "none")
    with pytest.raises(DataError, match=f"--data {tmp_path}/none: no rows in it; give it some, or leave it out"):
        read(tmp_path / "none")
    for empty in ("train", "validation"):
        splits = {"train": some, "validation": some, empty: some.select([])}
        DatasetDict(splits).save_to_disk(tmp_path / empty)
        with pytest.raises(DataError, match=f"--data {tmp_path}/{empty}: the split {empty}: no rows in it; give it"):
            read(tmp_path / empty)


def test_what_is_neither_a_file_nor_a_folder(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in ("/dev/null", tmp_path / "pipe"):
        with pytest.raises(DataError, match=f"--data {path}: expected a file or a folder, got a device or a pipe"):
            documents(str(path))


def test_a_folder_that_cannot_be_read_is_not_left_out(tmp_path, monkeypatch):
    """Its text was missing without a word; a hidden one has none."""
    for name in ("a", ".b"):
        (tmp_path / name).mkdir()
    (tmp_path / "c.txt").write_text("c")
    closed, scandir = {"a", ".b"}, os.scandir

    def opened(path):
        if os.path.basename(path) in closed:
            raise PermissionError(errno.EACCES, "Permission denied", os.fspath(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", opened)
    for reads in (read, lambda path: Documents(path, context=8)):
        with pytest.raises(DataError, match=f"--data {tmp_path}/a: Permission denied"):
            reads(tmp_path)
    closed.remove("a")
    assert read(tmp_path) == ["c"]


def test_bad_folders(tmp_path):
    with pytest.raises(DataError, match="no such file"):
        documents(str(tmp_path / "none"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="no text"):
        read(tmp_path / "empty")
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "state.json").write_text("{}")
    with pytest.raises(DataError, match="not a readable datasets directory"):
        read(broken)
    DatasetDict({"other": Dataset.from_dict({"text": ["a"]})}).save_to_disk(tmp_path / "splits")
    with pytest.raises(DataError, match="expected a split named train"):
        read(tmp_path / "splits")
