"""`--store hidden`: the teacher's states and head against the model's own; kills, damage and what is refused."""

import json
import resource
import signal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM

import logitless
from logitless.errors import DataError, OptionError
from logitless.sample import TeacherRecord, read_targets
from logitless.sample.columns import packed_hidden, unpacked_hidden
from logitless.workbench.common.space import OutOfSpace
from logitless.workbench.scoring import parts
from logitless.workbench.scoring.run import run
from tests.support.workbench.damage import DEEP
from tests.support.workbench.killing import killed
from tests.support.workbench.micro import micro_directory, micro_model
from tests.workbench.scoring.conftest import config, corpus

HIDDEN = 32


def own_states(micro, record: TeacherRecord) -> list[tuple[int, torch.Tensor]]:
    """(first row, what the model's head is called with before each token but the first) of each document."""
    model = AutoModelForCausalLM.from_pretrained(micro).eval()
    found = []
    for row, tokens, scored in record.documents():
        assert scored.tolist() == [False] + [True] * (len(tokens) - 1)
        with torch.no_grad():
            states = logitless.hidden_states(model, {"input_ids": torch.from_numpy(tokens)[None]})[0, :-1]
        found.append((row, states))
    return found


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(("stored", "error"), [("bfloat16", 2.0**-8), ("fp8", 2.0**-4)])
def test_states_and_head_are_the_models_own(micro, tmp_path, monkeypatch, stored, error):
    monkeypatch.setattr(parts, "GROUP", 1 << 12)
    data = corpus(tmp_path / "a.jsonl", 6)
    summary = run(config(micro, data, tmp_path / "t.parquet", store="hidden", hidden_dtype=stored, context_length=64))
    record = TeacherRecord(tmp_path / "t.parquet")
    assert record.kind == "hidden"
    assert record.file.num_row_groups > 3
    for row, states in own_states(micro, record):
        if len(states) > 64:
            continue
        rows = record.read(row + 1, row + 1 + len(states))
        assert rows.scored.all()
        largest = states.abs().amax(-1, keepdim=True)
        assert rows.hidden is not None
        off = (rows.hidden.float() - states).abs()
        assert (off <= error * states.abs() + 2.0**-9 / 448 * 1.01 * largest).all()
        assert off.max() > 0
    head = record.head()
    model = AutoModelForCausalLM.from_pretrained(micro)
    assert torch.equal(head.weight, model.lm_head.weight)
    assert summary["head_bytes"] == (tmp_path / "t.head.safetensors").stat().st_size
    # ... and the log-sum-exp that is written beside them, of the states as they were
    table = pq.read_table(tmp_path / "t.parquet")
    lse = torch.from_numpy(table["logsumexp"].to_numpy().astype(np.float32))
    whole = record.read(0, len(record))
    assert whole.scored.tolist() == lse.isfinite().tolist()
    again = torch.logsumexp(whole.hidden.float() @ head.weight.t(), -1)
    assert (again - lse)[whole.scored].abs().max() < 0.1
    assert (whole.hidden[~whole.scored] == 0).all()


def test_any_rows_are_read_alike(micro, tmp_path, monkeypatch, small_blocks):
    data = corpus(tmp_path / "a.jsonl", 8)
    for store in ("hidden", "topk"):
        monkeypatch.setattr(parts, "GROUP", 1 << 11)
        out = tmp_path / f"{store}.parquet"
        run(config(micro, data, out, store=store))
        record = TeacherRecord(out)
        whole = vars(record.read(0, len(record)))
        n = len(record)
        for begin, end in ((0, 1), (3, 250), (n - 1, n), (40, 40), (n, n), (17, n)):
            part = vars(record.read(begin, end))
            assert all(x is None or torch.equal(part[name], x[begin:end]) for name, x in whole.items())
        for begin, end in ((n - 1, n + 5), (-3, 2), (5, 3)):  # whose file was called unreadable
            with pytest.raises(OptionError, match=f"expected rows within 0..{n}, got {begin}..{end}$"):
                record.read(begin, end)


def test_best_entries_are_those_that_read_targets_gives(micro, tmp_path):
    run(config(micro, corpus(tmp_path / "a.jsonl", 4), tmp_path / "t.parquet", keep=5))
    record = TeacherRecord(tmp_path / "t.parquet")
    for target, (row, tokens, _) in zip(read_targets(record.path), record.documents(), strict=True):
        rows = record.read(row + 1, row + len(tokens))
        assert torch.equal(rows.ids, target.ids)
        torch.testing.assert_close(rows.log_weights.exp(), target.weights, rtol=1e-6, atol=0.0)


def test_a_killed_run_goes_on_to_the_same_bytes(micro, tmp_path):
    data = corpus(tmp_path / "a.jsonl")
    files = ("t.parquet", "t.head.safetensors")
    (tmp_path / "whole").mkdir()
    assert killed("never", config(micro, data, tmp_path / "whole" / "t.parquet", store="hidden")) == 0
    given = config(micro, data, tmp_path / "t.parquet", store="hidden")
    for after in (2, "merge"):
        assert killed(after, given) == -signal.SIGKILL
        assert not (tmp_path / "t.parquet").exists()
    assert killed("never", given) == 0
    for name in files:
        assert (tmp_path / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([*files, "a.jsonl", "whole"])
    with pytest.raises(OptionError, match=r"t.parquet exists already"):
        run(given)
    (tmp_path / "t.parquet").unlink()
    with pytest.raises(OptionError, match=r"its head .*t.head.safetensors exists already: remove it"):
        run(given)


def test_an_unfinished_run_goes_on_with_what_it_stores_only(micro, tmp_path):
    given = config(micro, corpus(tmp_path / "a.jsonl"), tmp_path / "t.parquet", store="hidden")
    assert killed(1, given) == -signal.SIGKILL
    with pytest.raises(OptionError, match="unfinished run with hidden_dtype bfloat16, now fp8: give the same"):
        run(config(micro, tmp_path / "a.jsonl", tmp_path / "t.parquet", store="hidden", hidden_dtype="fp8"))
    with pytest.raises(OptionError, match="unfinished run with store hidden, now topk: give the same"):
        run(config(micro, tmp_path / "a.jsonl", tmp_path / "t.parquet"))


def test_nothing_to_score_leaves_no_head(micro, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n')
    with pytest.raises(DataError, match=r"no token to score in 1 document; a first token .* --bos yes"):
        run(config(micro, tmp_path / "a.jsonl", tmp_path / "t.parquet", store="hidden"))
    assert [p.name for p in tmp_path.iterdir()] == ["a.jsonl"]


def test_a_head_that_does_not_fit_is_one_line_and_the_run_goes_on(micro, tmp_path):
    """safetensors says so by an error of its own, which is no OSError."""
    given = config(micro, corpus(tmp_path / "a.jsonl", 1), tmp_path / "t.parquet", store="hidden")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))  # the head has 33,000
        with pytest.raises(OutOfSpace, match=f"^a file at {tmp_path} is larger .*, then the same command goes on$"):
            run(given)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert run(given)["tokens_scored_now"] == 0


def test_a_head_with_softcap_and_bias_comes_back_with_them(tmp_path):
    (tmp_path / "model").mkdir()
    micro_directory(tmp_path / "model")
    model = micro_model(tie_word_embeddings=False)
    model.save_pretrained(tmp_path / "model")
    run(config(tmp_path / "model", corpus(tmp_path / "a.jsonl", 2), tmp_path / "t.parquet", store="hidden"))
    from logitless.sample.teacher import write_head

    head = logitless.LMHead(torch.randn(264, HIDDEN), torch.randn(264), scale=0.5, softcap=30.0, vocab_size=259)
    about = write_head(tmp_path / "t.head.safetensors", head)
    record = TeacherRecord(tmp_path / "t.parquet")
    record.about["head"] = json.loads(json.dumps(about))
    again = record.head()
    assert torch.equal(again.weight, head.weight)
    assert torch.equal(again.bias, head.bias)
    assert (again.scale, again.softcap, again.vocab_size) == (0.5, 30.0, 259)


def test_damage_is_one_line(micro, tmp_path):
    data = corpus(tmp_path / "a.jsonl", 3)
    out, head = tmp_path / "t.parquet", tmp_path / "t.head.safetensors"
    run(config(micro, data, out, store="hidden"))
    content, tensors = out.read_bytes(), head.read_bytes()
    start = pq.ParquetFile(out).metadata.row_group(0).column(pq.read_schema(out).names.index("hidden"))
    middle = bytearray(content)
    middle[start.data_page_offset + start.total_compressed_size // 2] ^= 0xFF
    out.write_bytes(middle)
    with pytest.raises(DataError, match=r"t.parquet: not a readable parquet file"):
        TeacherRecord(out).read(0, 9)
    out.write_bytes(content)
    head.write_bytes(tensors[:-1] + bytes([tensors[-1] ^ 1]))
    with pytest.raises(DataError, match=r"t.head.safetensors has the hash \w+, expected \w+, of .*own head"):
        TeacherRecord(out).head()
    head.unlink()
    with pytest.raises(DataError, match=r"t.head.safetensors is not there: the head of"):
        TeacherRecord(out).head()
    with pytest.raises(DataError, match="not a readable parquet file"):
        TeacherRecord(tmp_path / "none.parquet")


HEAD = {"file": "t.head.safetensors", "hash": "0", "scale": 1.0, "softcap": None, "vocab_size": None}


@pytest.mark.parametrize(
    "change",
    [
        b"",
        b"[]",
        b"[" * DEEP,
        {"store": "nothing"},
        {"vocab_size": "259"},
        {"bos": "<s>"},
        {"head": []},
        {"head": {}},
        {"head": HEAD | {"file": "../t.head.safetensors"}},
        {"head": HEAD | {"file": 3}},
        {"hidden_dtype": "int4"},
    ],
    ids=str,
)
def test_metadata_of_another_kind_is_one_line(micro, tmp_path, change):
    out = tmp_path / "t.parquet"
    run(config(micro, corpus(tmp_path / "a.jsonl", 3), out, store="hidden"))
    table = pq.read_table(out)
    about = json.loads(table.schema.metadata[b"logitless"])
    said = change if isinstance(change, bytes) else json.dumps(about | change).encode()
    pq.write_table(table.replace_schema_metadata({b"logitless": said}), out)
    with pytest.raises(DataError, match=r"t.parquet: expected .*metadata that .*: score again$"):
        TeacherRecord(out)


@pytest.mark.parametrize("name", ["token", "document", "logsumexp", "topk_ids", "topk_logits"])
def test_columns_of_another_kind_are_one_line(micro, tmp_path, name):
    out = tmp_path / "t.parquet"
    run(config(micro, corpus(tmp_path / "a.jsonl", 3), out))
    table = pq.read_table(out)
    other = pa.array(["x"] * len(table))
    pq.write_table(table.set_column(table.schema.get_field_index(name), name, other), out)
    with pytest.raises(
        DataError, match=rf"t.parquet: expected a column {name} of \w+.*, got one of string: score again"
    ):
        TeacherRecord(out)


def test_fp8_keeps_every_scale_of_token():
    hidden = torch.randn(50, 64) * torch.logspace(-30, 30, 50)[:, None]
    hidden[7] = 0
    again = unpacked_hidden(packed_hidden(hidden, "fp8"), "fp8")
    assert again.isfinite().all()
    assert (again[7] == 0).all()
    largest = hidden.abs().amax(-1, keepdim=True)
    assert ((again - hidden).abs() <= 2.0**-4 * hidden.abs() + 1e-5 * largest).all()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"hidden_dtype": "fp8"}, "--hidden-dtype fp8 is of --store hidden: give that, or leave it out"),
        ({"store": "hidden", "keep": 3}, "--keep 3 is of --store topk: give that, or leave it out"),
    ],
)
def test_options_of_the_other_way_to_store_have_no_meaning(micro, tmp_path, given, message):
    with pytest.raises(OptionError, match=message):
        run(config(micro, corpus(tmp_path / "a.jsonl", 2), tmp_path / "t.parquet", **given))
