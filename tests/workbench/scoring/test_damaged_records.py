"""Teacher's records that were damaged or changed after they were written: one line from every reader, no wrong loss."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Gemma2Config, Gemma2ForCausalLM

from logitless.errors import DataError
from logitless.hashes import hash_of
from logitless.sample import TeacherRecord, read_targets
from logitless.sample.teacher import GROUPS_KEPT
from logitless.workbench.scoring.run import run
from tests.support.workbench.micro import SHAPE, micro_directory, micro_model
from tests.workbench.scoring.conftest import config, corpus

V, KEEP, WIDTH = SHAPE["vocab_size"], 8, SHAPE["hidden_size"]
KINDS = {"bf16": {"store": "hidden"}, "fp8": {"store": "hidden", "hidden_dtype": "fp8"}, "topk": {"keep": KEEP}}
Damage = Callable[[Path], object]


@pytest.fixture(scope="module")
def written(micro, tmp_path_factory) -> Path:
    """A folder with a record of each kind."""
    root = tmp_path_factory.mktemp("records")
    data = corpus(root / "a.jsonl", 8)
    for name, more in KINDS.items():
        run(config(micro, data, root / f"{name}.parquet", context_length=32, stride=8, **more))
    return root


def copied(written: Path, kind: str, place: Path) -> Path:
    """A record of one kind for a test of its own."""
    for path in written.glob(f"{kind}.*"):
        shutil.copy(path, place)
    return place / f"{kind}.parquet"


def read_all(path: Path) -> None:
    """All that a record says, as a run or a program reads it."""
    record = TeacherRecord(path)
    if record.kind == "hidden":
        record.head()
    for first, tokens, _ in record.documents():
        record.read(first, first + len(tokens))


def table(change: Callable[[pa.Table], pa.Table]) -> Damage:
    return lambda path: pq.write_table(change(pq.read_table(path)), path, row_group_size=100)


def column(name: str, change: Callable[[list], list], kind: pa.DataType | None = None) -> Damage:
    """Another column in its place, of `kind` where it is one."""

    def changed(x: pa.Table) -> pa.Table:
        i = x.schema.get_field_index(name)
        return x.set_column(i, name, pa.array(change(x[name].to_pylist()), kind or x.schema.types[i]))

    return table(changed)


def each(name: str, change: Callable, kind: pa.DataType | None = None) -> Damage:
    """The same change of each value that is there."""
    return column(name, lambda values: [x if x is None else change(x) for x in values], kind)


def one(name: str, change: Callable) -> Damage:
    """A change of one value in the middle, which has a score."""
    return column(name, lambda values: [change(x) if i == 60 else x for i, x in enumerate(values)])


def about(change: Callable[[dict], dict]) -> Damage:
    """Other metadata."""

    def changed(x: pa.Table) -> pa.Table:
        said = change(json.loads(x.schema.metadata[b"logitless"]))
        return x.replace_schema_metadata({b"logitless": json.dumps(said)})

    return table(changed)


def unsized(change: Callable[[pa.Table], pa.Table]) -> Damage:
    """Other rows in a record of an earlier version, which does not say how many there are."""

    def damage(path: Path) -> None:
        about(lambda said: {name: x for name, x in said.items() if name != "rows"})(path)
        table(change)(path)

    return damage


def reordered(order: Callable[[int], list[int]]) -> Damage:
    return unsized(lambda x: x.take(order(len(x))))


def letter(name: bytes, other: int) -> Damage:
    """Another letter in the middle of a column's name, wherever the file has it."""

    def damage(path: Path) -> None:
        path.write_bytes(path.read_bytes().replace(name, name[:2] + bytes([other]) + name[3:]))

    return damage


def head_of(path: Path) -> Path:
    return path.with_name(f"{path.stem}.head.safetensors")


def head(change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> Damage:
    """Other tensors, and the hash that goes with them."""

    def damage(path: Path) -> None:
        place = head_of(path)
        save_file(change(load_file(place)), place)
        hashed = hash_of(place)
        about(lambda said: said | {"head": said["head"] | {"hash": hashed}})(path)

    return damage


def in_place_of_head(make: Damage) -> Damage:
    return lambda path: (head_of(path).unlink(), make(head_of(path)))


def no_head_within(path: Path) -> None:
    """A head that is no file of tensors, and the hash that goes with it."""
    head_of(path).write_bytes(b"\x08" + bytes(20))
    hashed = hash_of(head_of(path))
    about(lambda said: said | {"head": said["head"] | {"hash": hashed}})(path)


NAN, INF = float("nan"), float("inf")
ORDER = "expected documents in order, each with positions that count up from 0, got [0-9,]+ of [0-9,]+ rows otherwise"
MASS = f"expected best entries whose probabilities add up to {KEEP}/{V}..1, got "
IDS = f"expected best entries in 0..{V - 1}, each once, got "
ROWS = "expected [0-9,]+ rows, as were written, got [0-9,]+"
NO_FILE = "expected a file, got a folder, a device or a pipe"
OTHER_HEAD = r"head.safetensors: expected the head of .*parquet, got another \("
OF_ANY = {
    "no positions": (table(lambda x: x.drop(["position"])), "got no column position"),
    "a column twice": (table(lambda x: x.append_column("token", x["token"])), "token of int32, got one of int32 and"),
    "half": (table(lambda x: x.slice(0, len(x) // 2)), ROWS),
    "doubled": (table(lambda x: pa.concat_tables([x, x])), ROWS),
    "none": (table(lambda x: x.slice(0, 0)), ROWS),
    "doubled, of an earlier version": (unsized(lambda x: pa.concat_tables([x, x])), ORDER),
    "two rows swapped": (reordered(lambda n: [*range(60), 61, 60, *range(62, n)]), ORDER),
    "row groups swapped": (reordered(lambda n: [*range(100, 200), *range(100), *range(200, n)]), ORDER),
    "a row left out": (reordered(lambda n: [*range(60), *range(61, n)]), ORDER),
    "reversed": (reordered(lambda n: list(range(n))[::-1]), ORDER),
    "one document": (each("document", lambda x: 0), ORDER),
    "positions of 0": (each("position", lambda x: 0), ORDER),
    "no document": (one("document", lambda x: None), "a document, not null, in each row"),
    "no position": (one("position", lambda x: None), "a position, not null, in each row"),
    "no token": (one("token", lambda x: None), "a token, not null, in each row"),
    "a token beyond": (one("token", lambda x: V), rf"expected tokens in 0..{V - 1}, got 1 of "),
    "a token below": (one("token", lambda x: -1), rf"expected tokens in 0..{V - 1}, got 1 of "),
    "wide tokens": (each("token", int, pa.int64()), "a column token of int32, got one of int64"),
    "NaN as logsumexp": (one("logsumexp", lambda x: NAN), "each logsumexp finite or null, got 1 of"),
    "infinite logsumexp": (one("logsumexp", lambda x: INF), "each logsumexp finite or null, got 1 of"),
    "wide logsumexp": (each("logsumexp", float, pa.float64()), "a column logsumexp of float, got one of double"),
    "no vocabulary": (
        about(lambda said: said | {"vocab_size": 0}),
        "a bos of a vocabulary in the metadata, got None of 0",
    ),
    "a bos beyond": (about(lambda said: said | {"bos": V}), f"a bos of a vocabulary in the metadata, got {V} of {V}"),
    "one of several beyond": (
        about(lambda said: said | {"bos": [1, V]}),
        rf"a bos of a vocabulary in the metadata, got \[1, {V}\] of {V}",
    ),
    "one of several that is text": (about(lambda said: said | {"bos": [1, "1"]}), "the metadata that logitless score"),
    "a bos that is true": (about(lambda said: said | {"bos": True}), "the metadata that logitless score writes"),
    "a folder": (lambda path: (path.unlink(), path.mkdir()), NO_FILE),
    "a pipe": (lambda path: (path.unlink(), os.mkfifo(path)), NO_FILE),
    "a link to nothing": (lambda path: (path.unlink(), path.symlink_to("nothing")), "not a readable parquet file"),
}
OF_HIDDEN = {
    "no states": (column("hidden", lambda values: [None] * len(values)), "a hidden, not null, beside each logsumexp"),
    "no state": (one("hidden", lambda x: None), "a hidden, not null, beside each logsumexp, got 1 of"),
    "NaN as state": (one("hidden", lambda x: b"\xff" * len(x)), "expected hidden states that are finite, got 1 of"),
    "states of any width": (each("hidden", bytes, pa.binary()), r"column hidden of fixed_size_binary\[\d+\], got"),
    "narrow states": (each("hidden", lambda x: x[:30], pa.binary(30)), "got one of fixed_size_binary.30"),
    "another width": (about(lambda said: said | {"hidden_size": 3}), "got one of fixed_size_binary"),
    "no width": (about(lambda said: said | {"hidden_size": None}), "metadata that says which head and dtype"),
    "a head of no name": (
        about(lambda said: said | {"head": said["head"] | {"file": ""}}),
        "metadata that says which head and dtype",
    ),
    "a scale beyond floats": (
        about(lambda said: said | {"head": said["head"] | {"scale": 10**400}}),
        OTHER_HEAD + "LMHead: scale must be a finite number",
    ),
    "no head": (lambda path: head_of(path).unlink(), "head.safetensors is not there"),
    "a folder as head": (in_place_of_head(Path.mkdir), NO_FILE),
    "a pipe as head": (in_place_of_head(os.mkfifo), NO_FILE),
    "a link to nothing as head": (in_place_of_head(lambda x: x.symlink_to("nothing")), "is not there"),
    "no tensors": (no_head_within, OTHER_HEAD),
    "no weight": (head(lambda x: {"w": x["weight"]}), OTHER_HEAD + "expected a weight, and a bias at most, got w"),
    "more than a head": (head(lambda x: x | {"foo": torch.ones(7)}), OTHER_HEAD + ".* got foo, weight"),
    "whole numbers": (head(lambda x: {"weight": x["weight"].to(torch.int8)}), OTHER_HEAD + ".* got torch.int8"),
    "too many entries": (
        head(lambda x: {"weight": x["weight"].repeat(2, 1)}),
        f"{V} entries .* got {2 * V} of {WIDTH}",
    ),
    "a narrow head": (head(lambda x: {"weight": x["weight"][:, :5].contiguous()}), f"width {WIDTH}, got {V} of 5"),
    "one dimension": (head(lambda x: {"weight": x["weight"].flatten()}), OTHER_HEAD + r".*\(vocab, hidden\)"),
    "NaN in the head": (head(lambda x: {"weight": x["weight"].fill_(NAN)}), OTHER_HEAD + "expected finite weights"),
    "infinity in a bias": (
        head(lambda x: x | {"bias": torch.full((V,), -INF)}),
        OTHER_HEAD + "expected finite weights",
    ),
}
OF_FP8 = {
    "no scales": (table(lambda x: x.drop(["hidden_scale"])), "got no column hidden_scale"),
    "null as scale": (one("hidden_scale", lambda x: None), "a hidden_scale, not null, beside each logsumexp, got 1 of"),
    "NaN as scale": (one("hidden_scale", lambda x: NAN), "expected hidden_scale above 0, got 1 of"),
    "a scale below 0": (one("hidden_scale", lambda x: -x), "expected hidden_scale above 0, got 1 of"),
    "a scale of 0": (one("hidden_scale", lambda x: 0.0), "expected hidden_scale above 0, got 1 of"),
    "an infinite scale": (one("hidden_scale", lambda x: INF), "expected hidden states that are finite, got 1 of"),
    "whole scales": (each("hidden_scale", lambda x: 1, pa.int32()), "hidden_scale of float, got one of int32"),
    "text as scale": (each("hidden_scale", str, pa.string()), "hidden_scale of float, got one of string"),
    "bf16 in name": (about(lambda said: said | {"hidden_dtype": "bfloat16"}), "got one of fixed_size_binary"),
}
OF_BF16 = {"fp8 in name": (about(lambda said: said | {"hidden_dtype": "fp8"}), "got no column hidden_scale")}
OF_BEST = {
    "no ids": (one("topk_ids", lambda x: None), "a topk_ids, not null, beside each logsumexp, got 1 of"),
    "null within ids": (
        one("topk_ids", lambda x: [*x[1:], None]),
        "a topk_ids, not null, beside each logsumexp, got 1",
    ),
    "no logits": (one("topk_logits", lambda x: None), "a topk_logits, not null, beside each logsumexp, got 1 of"),
    "an id below": (one("topk_ids", lambda x: [-1, *x[1:]]), IDS),
    "an id beyond": (one("topk_ids", lambda x: [*x[1:], V]), IDS),
    "an id twice": (one("topk_ids", lambda x: [*x[:-1], x[0]]), IDS),
    "one id": (each("topk_ids", lambda x: [3] * KEEP), IDS),
    "short ids": (one("topk_ids", lambda x: x[:4]), f"expected {KEEP} topk_ids in each row, got 1 of"),
    "long ids": (one("topk_ids", lambda x: [*x, V - 1]), f"expected {KEEP} topk_ids in each row, got 1 of"),
    "ids of no list": (each("topk_ids", lambda x: x[0], pa.int32()), "topk_ids of .*list.*, got one of int32"),
    "wide ids": (each("topk_ids", list, pa.list_(pa.int64())), "topk_ids of .*int32.*, got one of .*int64"),
    "few logits": (each("topk_logits", lambda x: x[:4]), f"expected {KEEP} topk_logits in each row, got "),
    "another keep": (about(lambda said: said | {"keep": 4}), "expected 4 topk_ids in each row, got "),
    "no keep": (about(lambda said: said | {"keep": None}), rf"metadata whose keep is within 1\.\.{V}, got 0"),
    "NaN among logits": (one("topk_logits", lambda x: [*x[:-1], NAN]), MASS),
    "infinity among logits": (one("topk_logits", lambda x: [INF, *x[1:]]), MASS),
    "no probability": (one("topk_logits", lambda x: [-INF] * KEEP), MASS),
    "less than the best can have": (one("topk_logits", lambda x: [y - 9 for y in x]), MASS),
    "all and a little more": (one("logsumexp", lambda x: x - 9), MASS),
    "each below 1, together above": (each("topk_logits", lambda x: [5.0] * KEEP), MASS),
}
OF_ANY["a name that is no text"] = (letter(b"position", 0xE7), "not a readable parquet file")
CASES = [
    pytest.param(kind, *given, id=f"{kind}: {name}")
    for kind, damages in (
        ("bf16", {**OF_ANY, **OF_HIDDEN, **OF_BF16}),
        ("fp8", {**OF_HIDDEN, **OF_FP8}),
        ("topk", {**OF_ANY, **OF_BEST}),
    )
    for name, given in damages.items()
]


@pytest.mark.parametrize(("kind", "damage", "message"), CASES)
def test_damage_is_one_line_of_every_reader(written, tmp_path, kind, damage, message):
    path = copied(written, kind, tmp_path)
    damage(path)
    for read in (read_all, lambda path: list(read_targets(path)))[: 2 if kind == "topk" else 1]:
        with pytest.raises(DataError, match=message) as said:
            read(path)
        assert "\n" not in str(said.value)


@pytest.mark.skipif(int(pa.__version__.split(".")[0]) < 26, reason="this pyarrow reads no null among such lists")
def test_lists_of_one_length_are_read_too(written, tmp_path):
    """As records had them before, and as others may write them."""
    path = copied(written, "topk", tmp_path)
    known = vars(TeacherRecord(path).read(0, 200))
    for name, kind in (("topk_ids", pa.int32()), ("topk_logits", pa.float32())):
        each(name, list, pa.list_(kind, KEEP))(path)
    assert all(x is None or torch.equal(x, known[name]) for name, x in vars(TeacherRecord(path).read(0, 200)).items())


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_written_is_read_however_it_is_grouped(written, tmp_path, kind):
    """Windows that overlap, and unscored first tokens, are none of the damages above."""
    path = copied(written, kind, tmp_path)
    whole = TeacherRecord(path)
    known, documents = vars(whole.read(0, len(whole))), [tokens.tolist() for _, tokens, _ in whole.documents()]
    table(lambda x: x)(path)
    again = TeacherRecord(path)
    assert again.file.num_row_groups > GROUPS_KEPT
    read_all(path)
    rows = vars(again.read(0, len(again)))
    assert all(x is None or torch.equal(x, rows[name]) for name, x in known.items())
    assert len(again.kept) == GROUPS_KEPT
    assert [tokens.tolist() for _, tokens, _ in again.documents()] == documents


def test_a_record_with_another_footer_has_another_identity(written, tmp_path):
    """By which a run that is gone on with knows that it is the one that it began with."""
    path = copied(written, "topk", tmp_path)
    record, whole = TeacherRecord(path), path.read_bytes()
    known, begin = record.identity, len(whole) - 8 - int.from_bytes(whole[-8:-4], "little")
    for at in (begin, len(whole) - 9):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        assert record.identity != known
    path.write_bytes(whole)
    assert record.identity == known


def test_hidden_states_are_no_targets(written):
    message = r"bf16.parquet: expected best entries, got hidden .*: score without --store hidden, or .* TeacherRecord"
    with pytest.raises(DataError, match=message):
        next(read_targets(written / "bf16.parquet"))


def softcapped() -> Gemma2ForCausalLM:
    torch.manual_seed(0)
    return Gemma2ForCausalLM(Gemma2Config(**SHAPE, initializer_range=1.0, final_logit_softcapping=5.0))


MODELS = {
    "unsure": lambda: micro_model(tie_word_embeddings=False),
    "sure": lambda: micro_model(tie_word_embeddings=False, initializer_range=20.0),
    "softcapped": softcapped,
}


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("model", MODELS)
def test_rounding_is_no_damage(tmp_path, model, dtype):
    """All entries together have the probability 1, as far as float32 says of logits in the thousands."""
    micro_directory(tmp_path / "model")
    MODELS[model]().save_pretrained(tmp_path / "model")
    out = tmp_path / "t.parquet"
    run(config(tmp_path / "model", corpus(tmp_path / "a.jsonl", 6), out, keep=V, dtype=dtype))
    largest = np.nanmax(pq.read_table(out)["logsumexp"].to_numpy())
    assert (largest > 300) == (model == "sure")
    read_all(out)
