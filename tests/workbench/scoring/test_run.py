"""Whole runs: against the model's own logits, after a kill, with what cannot be scored."""

import io
import json
import math
import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from datasets import Dataset
from rich.console import Console
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from logitless.errors import ConfigError, DataError, NotFiniteError, OptionError
from logitless.models.positions import scale
from logitless.workbench.common import files
from logitless.workbench.common.files import write_json
from logitless.workbench.common.lock import LOCK_FILE, acquire
from logitless.workbench.runs.ending import Interrupted
from logitless.workbench.scoring import parts
from logitless.workbench.scoring import run as scoring
from logitless.workbench.scoring.run import run
from logitless.workbench.scoring.summary import measured_rows, show_rows
from logitless.workbench.scoring.summary import rows_of as summary_rows
from logitless.workbench.sources.model import load_tokenizer
from logitless.workbench.sources.tokenizer import pretrained
from tests.support.workbench.killing import killed, locked_by_another
from tests.support.workbench.micro import micro_directory, micro_model
from tests.workbench.scoring.conftest import config, corpus

CONTEXT, STRIDE = 48, 20


def rows_of(path: Path) -> dict[int, list[dict]]:
    """Rows by document, and that documents and positions come in order, each once."""
    out: dict[int, list[dict]] = {}
    last = (-1, -1)
    for row in pq.read_table(path).to_pylist():
        assert (row["document"], row["position"]) > last
        last = row["document"], row["position"]
        out.setdefault(row["document"], []).append(row)
    assert all([r["position"] for r in rows] == list(range(len(rows))) for rows in out.values())
    return out


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("bos", ["no", "yes"])
def test_every_row_is_what_the_models_own_logits_say(micro, tmp_path, bos):
    data = corpus(tmp_path / "a.jsonl", 10)
    more = {"context_length": CONTEXT, "stride": STRIDE, "bos": bos, "documents": tmp_path / "documents.jsonl"}
    summary = run(config(micro, data, tmp_path / "a.parquet", **more))
    model = AutoModelForCausalLM.from_pretrained(micro).double().eval()
    found, start = rows_of(tmp_path / "a.parquet"), [1] if bos == "yes" else []
    texts = [_text(line) for line in data.read_text().splitlines()]
    nats = scored = size = 0
    for document, text in enumerate(texts):
        rows = found.pop(document, [])
        assert len(rows) == len((text or "").encode())
        ids = start + [row["token"] for row in rows]
        for row, here in zip(rows, range(len(start), len(ids)), strict=True):
            if here == 0:
                assert row["context"] == 0
                assert row["logprob"] is row["rank"] is row["topk_ids"] is None
                continue
            seen = row["context"]
            assert (seen == here) if here <= CONTEXT else (CONTEXT + 1 - STRIDE <= seen <= CONTEXT)
            with torch.no_grad():
                z = model(torch.tensor([ids[here - seen : here]])).logits[0, -1]
            _agrees(row, z, ids[here])
            nats, scored, size = nats - row["logprob"], scored + 1, size + 1
    assert found == {}
    assert summary["scored_tokens"] == summary["tokens_scored_now"] == scored
    assert summary["tokens"] == scored + (0 if start else summary["documents"] - summary["skipped"])
    assert summary["perplexity"] == pytest.approx(math.exp(nats / scored), rel=1e-6)
    assert summary["bits_per_byte"] == pytest.approx(nats / math.log(2) / size, rel=1e-6)
    lines = [json.loads(line) for line in more["documents"].read_text().splitlines()]
    assert [line["document"] for line in lines] == list(range(len(texts)))
    assert sum(line["scored_tokens"] for line in lines) == scored
    assert [line["document"] for line in lines if "why" in line] == [i for i, t in enumerate(texts) if t is None]


def _text(line: str) -> str | None:
    return json.loads(line)["text"] if line.endswith("}") else None


def _agrees(row: dict, z: torch.Tensor, token: int) -> None:
    """A row against whole logits, to a tenth of what the documentation promises (1e-4 nat)."""
    logp = z.log_softmax(-1)
    expected = {
        "logprob": logp[token],
        "token_logit": z[token],
        "logsumexp": z.logsumexp(-1),
        "mean_logit": z.mean(),
        "entropy": -(logp.exp() * logp).sum(),
        "self_certainty": -logp.mean() - math.log(len(z)),
    }
    for name, value in expected.items():
        assert row[name] == pytest.approx(float(value), abs=1e-5), name
    assert row["rank"] == 1 + int((z > z[token]).sum())
    best = z.topk(3)
    assert row["topk_ids"] == best.indices.tolist()
    assert row["topk_logits"] == pytest.approx(best.values.tolist(), abs=1e-5)


@pytest.fixture(scope="module")
def whole(micro, tmp_path_factory) -> tuple[Path, bytes]:
    """A corpus, and the rows of a run that nobody disturbed."""
    place = tmp_path_factory.mktemp("whole")
    data = corpus(place / "a.jsonl")
    assert killed("never", config(micro, data, place / "a.parquet")) == 0
    return data, (place / "a.parquet").read_bytes()


def test_a_killed_run_goes_on_with_nothing_lost_or_doubled(micro, whole, tmp_path):
    data, expected = whole
    out = tmp_path / "a.parquet"
    for after in (1, 3, "merge"):  # parts written before the kill; then in the middle of the last file
        assert killed(after, config(micro, data, out)) == -signal.SIGKILL
        assert not out.exists()
    found = sorted(p.name for p in parts.Parts(out).folder.glob("0*.parquet"))
    assert len(found) >= 5
    assert killed("never", config(micro, data, out)) == 0
    assert out.read_bytes() == expected
    assert [p.name for p in tmp_path.iterdir()] == ["a.parquet"]


@pytest.mark.parametrize("damage", ["cut", "empty", "flipped"])
def test_a_damaged_part_is_scored_again(micro, whole, tmp_path, damage):
    data, expected = whole
    out = tmp_path / "a.parquet"
    assert killed("merge", config(micro, data, out)) == -signal.SIGKILL
    part = parts.Parts(out).part(1)
    content = part.read_bytes()
    middle = bytearray(content)
    middle[200] ^= 0xFF
    part.write_bytes({"cut": content[:-50], "empty": b"", "flipped": bytes(middle)}[damage])
    assert killed("never", config(micro, data, out)) == 0
    assert out.read_bytes() == expected


def test_an_unfinished_run_goes_on_with_the_same_options_only(micro, whole, tmp_path):
    data, _ = whole
    out = tmp_path / "a.parquet"
    assert killed(1, config(micro, data, out)) == -signal.SIGKILL
    with pytest.raises(OptionError, match="unfinished run with keep 3, now 4: give the same"):
        run(config(micro, data, out, keep=4))
    with pytest.raises(OptionError, match=r"with a budget of bytes \d+, now 1000000: give the same"):
        run(config(micro, data, out, memory_budget="1MB"))
    with pytest.raises(OptionError, match="unfinished run with data"):
        run(config(micro, corpus(tmp_path / "b.jsonl"), out))


CHANGES = {
    "the content of .*a.jsonl": lambda place: edit(place / "a.jsonl", "a", "b"),
    "the tokenizer": lambda place: edit(place / "model" / "tokenizer.json", '"Ġ"', '"ġ"'),
    "chat_template.jinja of --model .*": lambda place: edit(place / "model" / "chat_template.jinja", "role", "rule"),
    "model.safetensors of --model .*": lambda place: flip(place / "model" / "model.safetensors"),
    "config.json of --model .*": lambda place: edit(
        place / "model" / "config.json", '"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e-05'
    ),
    "the content of .*data-00000.*arrow": lambda place: edit(next((place / "table").glob("*.arrow")), "xyz", "xyy"),
}


def flip(path: Path) -> None:
    """A bit of the last weight, and the times of the file as before."""
    times, content = path.stat(), bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def edit(path: Path, old: str, new: str) -> None:
    """As many bytes as before."""
    content = path.read_bytes()
    assert old.encode() in content
    path.write_bytes(content.replace(old.encode(), new.encode(), 1))


@pytest.mark.parametrize("what", CHANGES)
def test_an_unfinished_run_does_not_go_on_with_changed_content(micro, tmp_path, monkeypatch, what):
    """Sizes, names and options stay the same: content alone tells."""
    data = corpus(tmp_path / "a.jsonl", 3)
    if "arrow" in what:
        Dataset.from_dict({"text": ["xyz", "xyz"]}).save_to_disk(data := tmp_path / "table")
    shutil.copytree(micro, tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.role }}{{ m.content }}{% endfor %}"
    )
    given = config(tmp_path / "model", data, tmp_path / "a.parquet")
    with monkeypatch.context() as stopped:
        stopped.setattr("logitless.workbench.scoring.run.conclude", _interrupt)
        with pytest.raises(KeyboardInterrupt):
            run(given)
    CHANGES[what](tmp_path)
    with pytest.raises(OptionError, match=rf"holds an unfinished run with {what} [0-9a-f]+, now [0-9a-f]+: give the"):
        run(given)


def test_a_part_of_another_run_is_scored_again(micro, tmp_path, monkeypatch):
    """Moved there by hand, whole and of the same number."""
    for name in ("a", "b"):
        (tmp_path / f"{name}.txt").write_text(name * 9)
        with monkeypatch.context() as stopped:
            stopped.setattr("logitless.workbench.scoring.run.conclude", _interrupt)
            with pytest.raises(KeyboardInterrupt):
                run(config(micro, tmp_path / f"{name}.txt", tmp_path / f"{name}.parquet"))
    mine, other = (parts.Parts(tmp_path / f"{name}.parquet") for name in ("a", "b"))
    shutil.copy(other.part(0), mine.part(0))
    assert mine.whole(0) is False
    assert other.whole(0) is True
    run(config(micro, tmp_path / "a.txt", tmp_path / "a.parquet"))
    text = pretrained(str(micro)).saved.decode([row["token"] for row in rows_of(tmp_path / "a.parquet")[0]])
    assert text == "a" * 9


def test_the_default_file_keeps_what_looks_like_a_suffix(micro, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("corpus-v1.5").mkdir()
    assert config(micro, Path("corpus-v1.5"), None).place == Path("corpus-v1.5.scores.parquet")
    assert config(micro, Path("corpus-v1.5.jsonl"), None).place == Path("corpus-v1.5.scores.parquet")
    Path("text-v1.5").write_text("a text")
    assert config(micro, Path("text-v1.5"), None).place == Path("text-v1.5.scores.parquet")
    assert config(micro, Path("text.TXT"), None).place == Path("text.scores.parquet")
    heads = [config(micro, "a.txt", Path(f"a-v1.5{end}"), store="hidden").head_place for end in ("", ".parquet")]
    assert heads == [Path("a-v1.5.head.safetensors")] * 2


def test_the_default_file_is_named_after_this_folder(micro, tmp_path, monkeypatch):
    Path(tmp_path / "texts" / "deeper").mkdir(parents=True)
    (tmp_path / "link").symlink_to("texts")
    monkeypatch.chdir(tmp_path / "texts" / "deeper")
    assert config(micro, Path(), None).place == Path("deeper.scores.parquet")
    assert config(micro, Path(".."), None).place == Path("texts.scores.parquet")
    assert config(micro, tmp_path / "link", None).place == Path("link.scores.parquet")


def test_a_file_that_is_there_is_not_written_over(micro, tmp_path):
    out = tmp_path / "a.parquet"
    out.write_text("mine")
    with pytest.raises(OptionError, match="exists already"):
        run(config(micro, corpus(tmp_path / "a.jsonl"), out))
    assert out.read_text() == "mine"


def test_a_clean_up_that_was_stopped_leaves_nothing_to_go_on_with(micro, tmp_path, monkeypatch):
    out = tmp_path / "a.parquet"
    with monkeypatch.context() as stopped:
        stopped.setattr(files.shutil, "rmtree", lambda folder: None)
        run(config(micro, corpus(tmp_path / "a.jsonl", 3), out))
    assert not parts.Parts(out).folder.exists()
    assert list(tmp_path.glob(".*"))
    out.unlink()
    (tmp_path / "b.txt").write_text("another")
    assert run(config(micro, tmp_path / "b.txt", out))["tokens"] == len(rows_of(out)[0]) == len("another")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.jsonl", "a.parquet", "b.txt"]


def test_two_runs_do_not_write_one_file(micro, tmp_path):
    given = config(micro, corpus(tmp_path / "a.jsonl", 3), tmp_path / "a.parquet")
    folder = parts.Parts(given.place).folder
    folder.mkdir()
    with (
        locked_by_another(folder) as pid,
        pytest.raises(OptionError, match=f"--out .*: process {pid} on .* is writing it: wait for its end"),
    ):
        run(given)
    assert run(given)["documents"] == 3
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.jsonl", "a.parquet"]


def test_a_folder_that_another_run_took_away_is_made_anew(micro, tmp_path, monkeypatch):
    """Between this run's `mkdir` and its lock the other one ends, and removes its parts."""
    place, tried = parts.Parts(tmp_path / "a.parquet"), []

    def late(folder):
        tried.append(folder)
        if len(tried) == 1:
            folder.rmdir()
        return acquire(folder)

    monkeypatch.setattr(parts, "acquire", late)
    with place.locked():
        assert len(tried) == 2
        assert place.folder.exists()
    assert not place.folder.exists()


def test_the_lock_of_a_folder_that_was_made_anew_is_not_taken_away(tmp_path):
    """One run removes its parts; before it lets go of them, another begins in the same place."""
    place = parts.Parts(tmp_path / "a.parquet")
    with place.locked():
        files.remove_whole(place.folder)
        place.folder.mkdir()
        (place.folder / LOCK_FILE).touch()
    assert (place.folder / LOCK_FILE).exists()


def test_what_a_run_writes_is_no_document_of_it(micro, tmp_path, monkeypatch):
    """All of it below the folder that is scored, relative to somewhere else; another file there is one."""
    monkeypatch.chdir(tmp_path)
    folder = Path("texts")
    folder.mkdir()
    data = corpus(folder / "a.jsonl", 5)
    given = config(micro, folder, tmp_path / "texts" / "s.parquet", documents=folder / "d.jsonl", json=folder / "j")
    before = run(replace(given, json=None))
    write_json(given.json, before)
    given.out.unlink()
    with monkeypatch.context() as stopped:
        stopped.setattr("logitless.workbench.scoring.run.conclude", _interrupt)
        with pytest.raises(KeyboardInterrupt):
            run(given)
    (folder / "b.txt").write_text("text")
    with pytest.raises(OptionError, match=r"unfinished run with the file texts/b.txt absent, now of 4 bytes: give"):
        run(given)
    (folder / "b.txt").unlink()
    alone = run(config(micro, data, tmp_path / "alone.parquet"))
    again = run(given)
    assert (again["documents"], again["tokens"]) == (alone["documents"], alone["tokens"])


@pytest.mark.parametrize("option", ["json", "documents"])
def test_documents_are_not_written_over(micro, tmp_path, option):
    """Nor by another run: what is below the folder with the text and is no result is a document."""
    (tmp_path / "texts" / "deeper").mkdir(parents=True)
    given = config(micro, tmp_path / "texts", tmp_path / "out.parquet")
    given.check()
    for name in ("a.txt", "b.jsonl", "deeper/c.parquet"):
        document = tmp_path / "texts" / name
        document.write_text('{"text": "schema"}')
        with pytest.raises(OptionError, match=f"--{option} {document} would overwrite what --data .* reads: write"):
            replace(given, **{option: document}).check()
    replace(given, **{option: tmp_path / "texts" / "new.jsonl"}).check()


@pytest.mark.parametrize("store", ["topk", "hidden"])
def test_a_run_that_ends_before_its_summary_is_written_goes_on(micro, tmp_path, monkeypatch, store):
    """As where the disk is full: the same call writes it, and the rows are those that were there."""
    given = config(
        micro, corpus(tmp_path / "a.jsonl", 5), tmp_path / "s.parquet", json=tmp_path / "s.json", store=store
    )
    with monkeypatch.context() as stopped:
        stopped.setattr("logitless.workbench.scoring.summary.write_json", _interrupt)
        with pytest.raises(KeyboardInterrupt, match=r"^the same command goes on with what is not finished$"):
            run(given)
    before = given.out.read_bytes()
    assert not given.json.exists()
    told = io.StringIO()
    summary = run(given, Console(file=told))
    assert "100% · scored before, and kept" in told.getvalue()
    assert json.loads(given.json.read_text()) == summary
    assert summary["tokens_scored_now"] == 0
    assert given.out.read_bytes() == before
    with pytest.raises(OptionError, match="exists already"):
        run(given)


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def test_nothing_to_score(micro, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": ""}\n{"text": "x"}\n')
    with pytest.raises(DataError, match=r"no token to score in 2 documents; .*a.jsonl:1: empty"):
        run(config(micro, tmp_path / "a.jsonl", tmp_path / "a.parquet", documents=tmp_path / "documents.jsonl"))
    (tmp_path / "folder").mkdir()
    with pytest.raises(DataError, match="no document in it"):
        run(config(micro, tmp_path / "folder", tmp_path / "a.parquet"))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.jsonl", "folder"]


def test_nothing_to_score_leaves_what_documents_names_as_it_was(micro, tmp_path):
    """A file of another run was replaced and then removed, and so was a device."""
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n')
    (tmp_path / "old.jsonl").write_text("old")
    (tmp_path / "device").symlink_to("/dev/null")  # which is not removed, as no link to it is
    for name in ("old.jsonl", "device"):
        with pytest.raises(DataError, match="no token to score"):
            run(config(micro, tmp_path / "a.jsonl", tmp_path / "a.parquet", documents=tmp_path / name))
    assert (tmp_path / "old.jsonl").read_text() == "old"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.jsonl", "device", "old.jsonl"]


def test_a_run_that_is_refused_leaves_nothing(micro, tmp_path):
    """Not even what another model, which it would then have to agree with, is held against."""
    (tmp_path / "a.jsonl").write_text('{"messages": [{"role": "assistant", "content": "x"}]}\n')
    with pytest.raises(ConfigError, match="chat template"):
        run(config(micro, tmp_path / "a.jsonl", tmp_path / "a.parquet"))
    assert [p.name for p in tmp_path.iterdir()] == ["a.jsonl"]


def test_a_name_is_no_markup():
    out = io.StringIO()
    show_rows(Console(file=out), [("written", "[red]x[/red].parquet")], [])
    assert "[red]x[/red].parquet" in out.getvalue()


@pytest.mark.parametrize("around", ["<s> $A </s>", "<pad> $A", "$A </s>", "<pad> <s> $A", "<s> <pad> <s> <pad> $A"])
def test_documents_begin_by_themselves_as_those_that_train_reads(micro, tmp_path, around):
    shutil.copytree(micro, tmp_path / "model")
    micro_directory(tmp_path / "model", around)
    opening = list(pretrained(str(tmp_path / "model")).opening)
    assert len(opening) == len(around.split("$A")[0].split())
    (tmp_path / "a.jsonl").write_text('{"text": "abc"}\n')
    summary = run(config(tmp_path / "model", tmp_path / "a.jsonl", tmp_path / "a.parquet"))
    assert summary["bos"] == (opening if len(opening) > 1 else [*opening, None][0])
    (rows,) = rows_of(tmp_path / "a.parquet").values()
    z = AutoModelForCausalLM.from_pretrained(micro)(torch.tensor([[*opening, *(row["token"] for row in rows)]])).logits
    scored = rows if opening else rows[1:]
    expected = z[0, max(0, len(opening) - 1) : -1].log_softmax(-1)[range(len(scored)), [row["token"] for row in scored]]
    torch.testing.assert_close(torch.tensor([row["logprob"] for row in scored]), expected)


def test_an_opening_may_be_longer_than_the_context(micro, tmp_path):
    shutil.copytree(micro, tmp_path / "model")
    micro_directory(tmp_path / "model", "<s> <pad> <s> <pad> $A")
    given = config(tmp_path / "model", corpus(tmp_path / "a.jsonl", 2), tmp_path / "a.parquet", context_length=2)
    run(given)
    model = AutoModelForCausalLM.from_pretrained(micro)
    for rows in rows_of(tmp_path / "a.parquet").values():
        assert [row["context"] for row in rows] == [2] * len(rows)
        ids = torch.tensor([1, 0, *(row["token"] for row in rows)])
        with torch.no_grad():
            z = model(ids.unfold(0, 2, 1)[:-1]).logits[:, -1].log_softmax(-1)
        expected = z.gather(-1, ids[2:, None])[:, 0]
        torch.testing.assert_close(torch.tensor([row["logprob"] for row in rows]), expected)


def test_what_a_text_begins_with_decides_what_an_unfinished_run_is(micro, tmp_path, monkeypatch):
    """Not the option: a tokenizer whose opening is read in another way would give rows of both kinds."""
    given = config(micro, corpus(tmp_path / "a.jsonl", 2), tmp_path / "a.parquet")

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(scoring, "conclude", stop)
        with pytest.raises(Interrupted):
            run(given)
    with monkeypatch.context() as patch:
        patch.setattr(scoring, "load_tokenizer", lambda source: replace(load_tokenizer(source), opening=(1,)))
        with pytest.raises(OptionError, match=r"an unfinished run with bos \[\], now \[1\]"):
            run(given)
    assert run(replace(given, bos="no"))["bos"] is None


def _broken(micro: Path, place: Path) -> str:
    """Saves a model that gives no numbers behind one byte, and returns that."""
    shutil.copytree(micro, place)
    model = AutoModelForCausalLM.from_pretrained(micro)
    with torch.no_grad():
        model.model.embed_tokens.weight[2 + 50] = float("nan")
    model.config.tie_word_embeddings = False
    model.lm_head.weight = torch.nn.Parameter(torch.randn(259, 32))
    model.save_pretrained(place)
    return pretrained(str(place)).saved.decode([2 + 50])


def test_a_model_that_gives_no_numbers_is_reported_and_its_rows_have_no_scores(micro, tmp_path):
    broken = tmp_path / "model"
    letter = _broken(micro, broken)
    (tmp_path / "a.jsonl").write_text(f'{{"text": "abc"}}\n{{"text": "ab{letter}c"}}\n{{"text": "bca"}}\n')
    summary = run(config(broken, tmp_path / "a.jsonl", tmp_path / "a.parquet"))
    assert summary["skipped"] == 1
    assert summary["skipped_documents"][0]["why"] == "its scores are not finite"
    assert summary["scored_tokens"] == 4
    assert dict(summary_rows(summary))["tokens"] == (
        "4 scored; 6 not: the first of a text, not the assistant's, or skipped"
    )
    found = rows_of(tmp_path / "a.parquet")
    assert [len(found[i]) for i in range(3)] == [3, 4, 3]
    assert all(row["logprob"] is None for row in found[1])
    assert np.isfinite([row["logprob"] for i in (0, 2) for row in found[i][1:]]).all()


@pytest.mark.usefixtures("small_blocks")
def test_of_a_long_document_a_piece_may_be_passed_over(micro, tmp_path):
    """Its other tokens are scored, so that it is not one of the skipped documents."""
    letter = _broken(micro, tmp_path / "model")
    texts = tmp_path / "texts"
    texts.mkdir()
    (texts / "a.txt").write_text("abc\n" * 50 + letter + "abc\n" * 500)
    (texts / "b.txt").write_text(f"ab{letter}c")
    given = config(tmp_path / "model", texts, tmp_path / "s.parquet", context_length=8)
    summary = run(replace(given, documents=tmp_path / "d.jsonl"))
    assert (summary["documents"], summary["skipped"]) == (2, 1)
    whys = [x["why"] for x in summary["skipped_documents"]]
    assert whys == ["in part: its scores are not finite", "its scores are not finite"]
    lines = [json.loads(line) for line in (tmp_path / "d.jsonl").read_text().splitlines()]
    assert [line["why"] for line in lines] == whys
    assert 0 < lines[0]["scored_tokens"] == summary["scored_tokens"] < lines[0]["tokens"]


@pytest.mark.parametrize("store", ["topk", "hidden"])
def test_a_model_that_gives_no_number_at_all(micro, tmp_path, store):
    shutil.copytree(micro, tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(micro)
    with torch.no_grad():
        model.model.norm.weight.fill_(float("nan"))
    model.save_pretrained(tmp_path / "model")
    data = corpus(tmp_path / "a.jsonl", 4)
    with pytest.raises(NotFiniteError, match=f"--model {tmp_path}/model: the scores of 4 documents are not finite"):
        run(config(tmp_path / "model", data, tmp_path / "a.parquet", store=store))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.jsonl", "model"]


@pytest.mark.parametrize("name", ["00000000.parquet", "manifest.json", "new/line.json"])
@pytest.mark.parametrize("option", ["json", "documents", "data"])
def test_nothing_else_is_among_the_parts(micro, tmp_path, option, name):
    given = config(micro, corpus(tmp_path / "a.jsonl", 2), tmp_path / "[a].parquet")
    (folder := parts.Parts(given.place).folder).mkdir()
    place = folder / name
    with pytest.raises(OptionError, match=f"--{option} .* is among what the run itself writes into"):
        run(replace(given, **{option: str(place) if option == "data" else place}))
    assert not list(folder.iterdir())


def test_texts_that_the_tokenizer_cannot_read_are_passed_over(micro, tmp_path):
    """One of words has no id for a word: the whole run ended there, with no document's name."""
    shutil.copytree(micro, tmp_path / "model")
    words = Tokenizer(models.WordLevel({"a": 0, "b": 1, "</s>": 2}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    template = "{% for message in messages %}{{ message.content }} {% endfor %}"
    saved = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>", chat_template=template)
    saved.save_pretrained(tmp_path / "model")
    chats = [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": x}]} for x in "bc"]
    rows = [{"text": "a b a"}, {"text": "a c"}, {"text": "b a"}, *chats, {"text": " "}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    summary = run(config(tmp_path / "model", tmp_path / "a.jsonl", tmp_path / "a.parquet"))
    assert (summary["documents"], summary["scored_tokens"]) == (6, 2 + 1 + 1)
    assert summary["bytes"] == len(" b a") + len(" a") + len("b")  # of what has a score alone
    assert [x["name"] for x in summary["skipped_documents"]] == [f"{tmp_path}/a.jsonl:{line}" for line in (2, 5, 6)]
    *unread, blank = summary["skipped_documents"]
    assert blank["why"] == "no token in it"
    for skipped in unread:
        assert skipped["why"].startswith(f"the tokenizer at {tmp_path}/model cannot read this text: WordLevel error")


def test_folders_that_nothing_is_written_into_are_taken_away(micro, tmp_path):
    (tmp_path / "a.txt").write_text("")
    there = tmp_path / "there"
    there.mkdir()
    for place in (there, tmp_path / "new" / "deep"):
        given = config(micro, tmp_path / "a.txt", place / "a.parquet", json=tmp_path / "new" / "b" / "a.json")
        with pytest.raises(DataError, match="no token to score in 1 document"):
            run(given)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.txt", "there"]


@pytest.mark.parametrize(
    ("more", "error", "message"),
    [
        ({"keep": 260}, OptionError, "--keep must be at most the vocabulary, here 259, got 260"),
        ({"keep": -1}, OptionError, "--keep must be 0 or more"),
        ({"context_length": 65}, OptionError, "^--context-length 65: .* has positions up to 64"),
        ({"context_length": 8, "stride": 9}, OptionError, "--stride must be at most --context-length, here 8"),
        ({"batch_tokens": 0}, OptionError, "--batch-tokens must be at least 1"),
        ({"data": None}, OptionError, "--data is missing"),
        ({"data": "nowhere"}, DataError, "--data nowhere: no such file"),
        ({"documents": Path()}, OptionError, "--documents . is a folder; name a file in it"),
        ({"json": Path()}, OptionError, "--json . is a folder; name a file in it"),
        ({"documents": Path("-")}, OptionError, "--documents -: expected a file to write"),
        ({"out": Path()}, OptionError, "--out . is a folder; name a file in it"),
        ({"out": Path("/dev/null")}, OptionError, "--out /dev/null: expected a file, .* got a device"),
        ({"out": Path("a.CSV")}, OptionError, r"^--out a.CSV: rows are written as parquet; .* ends in .parquet$"),
        ({"model": "tiny"}, ConfigError, "a directory with weights to score with, or a hub id"),
        ({"memory_budget": "much"}, OptionError, "--memory-budget must be a size"),
    ],
)
def test_options_without_a_meaning(micro, tmp_path, more, error, message):
    data = corpus(tmp_path / "a.jsonl", 2)
    given = {"model": str(micro), "data": str(data), **more}
    base = config(micro, data, tmp_path / "a.parquet")
    with pytest.raises(error, match=message):
        run(replace(base, **given))
    assert [p.name for p in tmp_path.iterdir()] == ["a.jsonl"]


def test_by_default_the_context_is_as_long_as_stretched_positions_reach(tmp_path):
    """64 positions, scaled to 128 as `logitless train --rope-scaling linear:2` writes them."""
    (tmp_path / "model").mkdir()
    micro_directory(tmp_path / "model")
    model = micro_model()
    scale(model.config, "linear:2")
    model.save_pretrained(tmp_path / "model")
    run(config(tmp_path / "model", corpus(tmp_path / "a.jsonl", 8), tmp_path / "a.parquet"))
    assert max(row["context"] for rows in rows_of(tmp_path / "a.parquet").values() for row in rows) == 128


@pytest.mark.parametrize(
    ("speed", "said"), [("tokens", "1,235 tokens/s, 2 s"), ("requests", "0.53 requests/s, 2 s")], ids=["fast", "slow"]
)
def test_the_speed_that_is_shown(speed, said):
    """A slow run's is not 0."""
    measured = {"tokens_per_second": 1234.6} if speed == "tokens" else {"requests_per_second": 0.533}
    assert measured_rows({**measured, "seconds": 2.0, "peak_memory_bytes": 1})[0] == ("speed", said)
