"""Where documents come from, cut into pieces; and what is said of those that are none."""

import json
import tracemalloc

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset

from logitless.errors import DataError
from logitless.workbench.scoring import documents as module
from logitless.workbench.scoring.documents import Documents
from tests.support.workbench.damage import not_utf8


def read(path, context: int = 4) -> list[tuple[str, str]]:
    """(text, problem) of each piece."""
    pieces = list(Documents(path, context))
    done = [p.done for p in pieces]
    assert done == sorted(done)
    assert not done or done[-1] == pytest.approx(1.0)
    return [(p.text, p.problem) for p in pieces]


def test_a_folder_in_the_order_of_its_names(tmp_path):
    (tmp_path / "b.txt").write_text("zwei ä\n", encoding="utf-8")
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n\n{"content": "more"}\n')
    (tmp_path / ".hidden").write_text("no")
    (tmp_path / "c").mkdir()
    pq.write_table(pa.table({"text": ["three", "four"]}), tmp_path / "c" / "d.parquet")
    assert [text for text, _ in read(tmp_path)] == ["one", "more", "zwei ä\n", "three", "four"]
    names = [p.name for p in Documents(tmp_path, 4)]
    assert names[0].endswith("a.jsonl:1")
    assert names[1].endswith("a.jsonl:3")
    assert names[-1].endswith("d.parquet:2")
    assert [p.document for p in Documents(tmp_path, 4)] == [0, 1, 2, 3, 4]


def test_a_datasets_directory(tmp_path):
    Dataset.from_dict({"text": ["one", None, "two"]}).save_to_disk(tmp_path / "d")
    assert read(tmp_path / "d") == [("one", ""), ("", "null in the place of text"), ("two", "")]
    Dataset.from_dict({"title": ["one"]}).save_to_disk(tmp_path / "e")
    with pytest.raises(DataError, match=f"--data {tmp_path}/e: expected a column named text, content or messages"):
        read(tmp_path / "e")


def test_a_datasets_directory_of_conversations(tmp_path):
    chats = [[{"role": "assistant", "content": x}] for x in "abcd"]
    Dataset.from_dict({"messages": chats}).save_to_disk(tmp_path / "d")
    pieces = list(Documents(tmp_path / "d", 4))
    assert [p.name for p in pieces] == [f"{tmp_path}/d:{row}" for row in (1, 2, 3, 4)]
    assert [p.done for p in pieces] == pytest.approx([0.25, 0.5, 0.75, 1.0])


def test_marks_and_ends_of_lines_of_other_systems(tmp_path):
    """A byte-order mark is no text, a carriage return alone ends a line, and suffixes may be in capitals."""
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "one"}\r{"text": "two"}\r\n{"text": "three"}')
    (tmp_path / "b.txt").write_bytes(b"\xef\xbb\xbffour")
    pq.write_table(pa.table({"text": ["five"]}), tmp_path / "c.PARQUET")
    assert read(tmp_path) == [(text, "") for text in ("one", "two", "three", "four", "five")]


BAD_LINES = {
    b'{"text": "fine"}': "",
    b'{"text": ""}': "empty",
    b'{"text": null}': "null in the place of text",
    b'{"text": 3}': "int in the place of text",
    b'{"title": "x"}': "no field named text, content or messages",
    b"[1]": "list in the place of an object",
    b'{"text": "cut': "not JSON (Invalid control character at)",
    b"\xff\xfe": "not UTF-8 text",
    b'{"text": "\\ud800"}': "not valid Unicode (a lone surrogate)",
    b"[" * 100_000: "not JSON (nested too deeply)",
}


def test_bad_lines_are_named_and_the_others_read(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\n".join([*BAD_LINES, b'{"text": "last"}']))
    found = read(path)
    assert [problem for _, problem in found] == [*BAD_LINES.values(), ""]
    assert found[-1][0] == "last"


def test_a_number_of_too_many_digits_is_not_said_to_be_nested(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a", "id": ' + "1" * 5000 + "}")
    [(_, problem)] = read(path)
    assert problem.startswith("not JSON (Exceeds the limit")


def test_files_that_are_no_text(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"caf\xe9")
    (tmp_path / "b.bin").write_bytes(b"a\0b")
    (tmp_path / "c.txt").write_text("")
    (tmp_path / "d.parquet").write_bytes(b"PAR1 no")
    pq.write_table(pa.table({"other": [1]}), tmp_path / "e.parquet")
    bad_text = pa.array([b"\xff", b"ok"]).view(pa.binary()).cast(pa.binary())
    pq.write_table(pa.table({"text": bad_text}), tmp_path / "f.parquet")
    problems = [problem for _, problem in read(tmp_path)]
    expected = ["not UTF-8", "NUL", "empty", "not readable as parquet", "no column named", "bytes in", "bytes in"]
    assert len(problems) == len(expected)
    for found, wanted in zip(problems, expected, strict=True):
        assert wanted in found


def test_a_parquet_file_that_ends_early_gives_what_is_before(tmp_path):
    path = tmp_path / "a.parquet"
    rows = [f"document {i} " + "x" * 200 for i in range(400)]
    pq.write_table(pa.table({"text": rows}), path, row_group_size=100, compression="none", use_dictionary=False)
    spoiled = bytearray(path.read_bytes())
    third = spoiled.index(b"document 200 ")
    spoiled[third - 60 : third] = b"\xff" * 60  # the page's header
    path.write_bytes(bytes(spoiled))
    found = read(path)
    assert list(Documents(path, 4))[-1].name == f"{path}:{len(found)}"
    good = [text for text, _ in found[:-1]]
    assert 130 < len(good) <= 200
    assert good == rows[: len(good)]
    assert "not readable as parquet" in found[-1][1]


def test_nothing_there(tmp_path):
    with pytest.raises(DataError, match="no such file"):
        Documents(tmp_path / "none", 4)
    assert read(tmp_path) == []


@pytest.mark.parametrize("kind", ["txt", "jsonl"])
def test_a_long_document_comes_in_pieces_with_what_is_before_them(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(module, "PIECE", 64)
    text = "".join(f"line {i} ä\n" for i in range(60)) + "x" * 200 + " " + "word " * 40
    path = tmp_path / f"a.{kind}"
    path.write_text(text if kind == "txt" else json.dumps({"text": text}), encoding="utf-8")
    pieces = list(Documents(path, 2))
    assert "".join(p.text for p in pieces) == text
    assert {p.document for p in pieces} == {0}
    assert max(len(p.text) for p in pieces) <= 64
    before = ""
    for p in pieces:
        assert p.lead == before[-32:]
        before += p.text
    assert all(p.text.endswith("\n") for p in pieces[:8])
    assert sum(p.text.startswith(" ") for p in pieces[-4:]) >= 3


def test_each_piece_of_a_long_document_is_as_far_as_it_reaches(tmp_path, monkeypatch):
    """Of the second document too, and of the second file."""
    monkeypatch.setattr(module, "PIECE", 50)
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_text(2 * (json.dumps({"text": "x" * 1000}) + "\n"))
    expected = [(i + 1) / 80 for i in range(80)]
    assert [piece.done for piece in Documents(tmp_path, 2)] == pytest.approx(expected, abs=0.01)
    done = [piece.done for piece in Documents(tmp_path / "a.jsonl", 2)]
    assert done == pytest.approx(expected[1::2], abs=0.01)


def test_a_table_that_is_smaller_than_its_text_is_never_further_than_its_end(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "PIECE", 500)
    pq.write_table(pa.table({"text": ["x" * 50_000] * 2}), tmp_path / "a.parquet", compression="zstd")
    assert len(read(tmp_path / "a.parquet")) == 200
    done = [piece.done for piece in Documents(tmp_path / "a.parquet", 2)]
    assert done[99] == pytest.approx(0.5)
    assert max(done[:99]) <= 0.5


def test_a_file_that_is_no_text_far_behind_gives_no_piece(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "PIECE", 64)
    (tmp_path / "a.txt").write_bytes(b"fine\n" * 100 + b"\xff")
    assert read(tmp_path / "a.txt") == [("", "not UTF-8 text")]


@pytest.mark.parametrize("kind", ["txt", "jsonl", "parquet"])
def test_a_file_is_never_held(tmp_path, kind):
    """8 MB of text in pieces: at any time a few of them."""
    path, line = tmp_path / f"a.{kind}", "some words of a line that is long enough " * 25 + "\n"
    if kind == "parquet":
        pq.write_table(pa.table({"text": [line * 8] * 1_000}), path, row_group_size=100, compression="none")
    else:
        text = line if kind == "txt" else json.dumps({"text": line}) + "\n"
        path.write_text(text * 8_000)
    assert path.stat().st_size > 8e6 or kind == "parquet"
    tracemalloc.start()
    try:
        size = sum(len(piece.text) for piece in Documents(path, 64))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert size == 8_000 * len(line)
    assert peak < 2e6


def test_conversations_that_are_no_text_are_passed_over(tmp_path):
    """Each by itself: the others are scored."""
    said = '{"messages": [{"role": "assistant", "content": "%s"}]}\n'
    (tmp_path / "a.jsonl").write_text(said % "a" + said % "\\ud83d" + said % "b")
    assert read(tmp_path / "a.jsonl") == [("", ""), ("", "not valid Unicode (a lone surrogate)"), ("", "")]
    texts = pa.concat_arrays([pa.array(["a"]), not_utf8(1), pa.array(["b"])])
    pq.write_table(pa.table({"prompt": texts, "completion": texts}), tmp_path / "a.parquet")
    assert read(tmp_path / "a.parquet") == [("", ""), ("", "not UTF-8 text"), ("", "")]
    pq.write_table(pa.table({"text": pa.array([0, 10**13]).cast(pa.timestamp("s"))}), tmp_path / "b.parquet")
    assert read(tmp_path / "b.parquet") == [("", "datetime in the place of text"), ("", "date value out of range")]
    Dataset(pa.table({"text": texts})).save_to_disk(tmp_path / "d")
    with pytest.raises(DataError, match=f"--data {tmp_path}/d: expected text in UTF-8"):
        read(tmp_path / "d")
