"""Two ranks share the work and give what one gives."""

import os
import shutil
import signal
import time

import pyarrow.parquet as pq
import pytest
from rich.console import Console

from logitless.cli.main import main
from logitless.errors import DataError, RankError
from logitless.workbench.runs import ranks
from logitless.workbench.scoring import block, documents
from logitless.workbench.scoring import run as scoring
from logitless.workbench.scoring.parts import Parts
from logitless.workbench.scoring.run import run
from tests.support.integrations.launching import leave, torchrun
from tests.support.workbench.micro import micro_model
from tests.workbench.scoring.conftest import config, corpus
from tests.workbench.sft.test_ranks import launch


@pytest.mark.slow
@pytest.mark.parametrize("store", ["topk", "hidden"])
def test_two_ranks_give_what_one_gives(micro, tmp_path, store):
    data = corpus(tmp_path / "a.jsonl", 40)
    torchrun("tests.workbench.scoring.test_ranks", str(micro), str(data), str(tmp_path / "two.parquet"), store)
    head = ["two.head.safetensors"] if store == "hidden" else []
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.jsonl", *head, "two.parquet"]
    small = documents.PIECE, block.PIECE
    try:
        documents.PIECE = block.PIECE = 400
        summary = run(config(micro, data, tmp_path / "one.parquet", store=store))
    finally:
        documents.PIECE, block.PIECE = small
    assert summary["ranks"] == 1
    one, two = (tmp_path / f"{name}.parquet" for name in ("one", "two"))
    if store == "topk":
        assert two.read_bytes() == one.read_bytes()
    else:  # the records name their heads' files
        assert pq.read_table(two).equals(pq.read_table(one))
        heads = [path.with_suffix(".head.safetensors").read_bytes() for path in (one, two)]
        assert heads[0] == heads[1]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["TERM", "INT"])
def test_ranks_of_a_stopped_launch_say_how_to_go_on(name, micro, tmp_path):
    data, out = corpus(tmp_path / "a.jsonl", 40), tmp_path / "two.parquet"
    with pytest.raises(AssertionError) as stopped:
        torchrun("tests.workbench.scoring.test_ranks", str(micro), str(data), str(out), "topk", name)
    said = [line for line in str(stopped.value).splitlines() if line.startswith("interrupted; rank")]
    assert len(said) == 2, stopped.value
    assert all(line.endswith("; the same command goes on with what is not finished") for line in said)
    assert not out.exists()
    torchrun("tests.workbench.scoring.test_ranks", str(micro), str(data), str(out), "resumed")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.jsonl", "two.parquet"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--keep=4"], "ranks disagree on keep: 3 on rank 0, 4 on rank 1"),
        (["--model=OTHER"], "ranks disagree on "),
        (["--data=MORE"], "ranks disagree on "),
        (["--out=other.parquet"], "ranks disagree on out: "),
        (["torch=1.0"], "1.0 on rank 1; start all with the same installation"),
        ([], "exists already: remove it"),
    ],
)
def test_ranks_that_would_mix_what_they_write_are_refused(micro, tmp_path, more, message):
    """And all of them say what the first one alone finds."""
    data, out = corpus(tmp_path / "a.jsonl"), tmp_path / "out.parquet"
    shutil.copytree(micro, tmp_path / "model")
    micro_model(hidden_size=16).save_pretrained(tmp_path / "model")
    shutil.copy(data, tmp_path / "b.jsonl")
    names = {"OTHER": str(tmp_path / "model"), "MORE": str(tmp_path / "b.jsonl")}
    more = [x.replace(*name) for x in more for name in names.items() if name[0] in x] or more
    if not more:
        out.touch()
    given = ["score", "--model", micro, "--data", data, "--keep", 3, "--device", "cpu", "--out", out]
    status, written = launch(2, *(["DIFFER", *more] if more else []), *given)
    assert status != 0
    assert written.count("logitless: ") == written.count(message) == 2, written[-4000:]
    assert not (tmp_path / "out.parquet.parts").exists()


@pytest.mark.parametrize(("here", "there"), [("absent", "of 3 bytes"), ("of 3 bytes", "absent")])
def test_a_file_that_one_rank_alone_has(monkeypatch, here, there):
    monkeypatch.setattr(ranks.dist, "is_initialized", lambda: True)
    every = [{} if size == "absent" else {"the file b.txt": size} for size in (here, there)]
    monkeypatch.setattr(ranks, "_of_all", lambda mine: [{**mine, **one} for one in every])
    with pytest.raises(RankError, match=rf"disagree on the file b\.txt: {here} on rank 0, {there} on rank 1"):
        ranks.agree()


def test_a_rank_that_does_not_see_the_parts(monkeypatch, micro, tmp_path):
    given = config(micro, tmp_path / "a.jsonl", tmp_path / "out.parquet")
    monkeypatch.setattr(scoring, "first", lambda work: None)  # as on another machine
    with (
        pytest.raises(DataError, match=r"out\.parquet\.parts is not on this machine: all ranks need an --out"),
        scoring.opened(given, Parts(given.place), dict, Console(quiet=True)),
    ):
        pass


def end_launch(name: str) -> None:
    """The last rank ends its launcher, as a scheduler or a terminal does, with its second block."""
    begun = []

    def score_block(scorer, given, *rest, usual=scoring.score_block):
        begun.append(given)
        if len(begun) == 2 and os.environ["RANK"] == "1":
            os.kill(os.getppid(), signal.Signals[f"SIG{name}"])
            time.sleep(30)  # which the launcher's signal ends
        return usual(scorer, given, *rest)

    scoring.score_block = score_block


if __name__ == "__main__":
    import sys
    from pathlib import Path

    documents.PIECE = block.PIECE = 400
    if sys.argv[5:]:
        end_launch(sys.argv[5])
    if sys.argv[5:] or sys.argv[4] == "resumed":
        options = zip(("--model", "--data", "--out"), sys.argv[1:4], strict=True)
        raise SystemExit(main(["score", "--keep", "3", "--device", "cpu", *(x for pair in options for x in pair)]))
    model, data, out = map(Path, sys.argv[1:4])
    summary = run(config(model, data, out, store=sys.argv[4]))
    assert not summary or (summary["ranks"] == 2 and summary["tokens_scored_now"] == summary["scored_tokens"])
    leave()
