"""`logitless eval --tasks` on tasks in lm-evaluation-harness' format; `make test-lm-eval` has the harness at hand."""

import json
import math
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from logitless.cli.main import main
from logitless.errors import DataError, NotFiniteError, OptionError
from logitless.integrations.transformers import continuations
from logitless.workbench.evaluation.answers import _of_choices
from logitless.workbench.evaluation.config import EvalConfig
from logitless.workbench.evaluation.run import run
from logitless.workbench.evaluation.tasks import _manifest
from logitless.workbench.sources.model import load_tokenizer, resolve_trained
from tests.support.forked import begin
from tests.support.integrations.launching import torchrun
from tests.support.workbench.browser import CHROMIUM, CONTRAST, chromium
from tests.workbench.evaluation.conftest import biased

pytest.importorskip("lm_eval", reason="needs lm-eval: make test-lm-eval")

from logitless.integrations.lm_eval_records import Records

TASKS = Path(__file__).parents[3] / "bench" / "lm_eval"
CHOICE, TEXT, WORD = (str(TASKS / f"docstrings_{name}.yaml") for name in ("choice", "text", "word"))
FILES = ["page.html", "records.jsonl", "summary.json"]
pytestmark = [pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore")]


def options(micro: Path, out: Path, **more: object) -> EvalConfig:
    given: dict[str, Any] = {"tasks": (CHOICE, TEXT, WORD), "limit": 11, "device": "cpu", **more}
    return EvalConfig(model=str(micro), out=out, **given)


def test_a_table_for_people_and_json_for_machines(micro, tmp_path, capsys):
    out = tmp_path / "e"
    given = ["--model", str(micro), "--limit", "5", "--device", "cpu", "--out", str(out), "--json", "-"]
    assert main(["eval", "--tasks", CHOICE, *given]) == 0
    said, shown = capsys.readouterr()
    summary = json.loads(said)
    found = summary["tasks"]["docstrings_choice"]
    assert found["documents"] == 5
    assert 0 <= found["metrics"]["acc"]["value"] <= 1
    assert summary["requests"] == 20
    assert "docstrings_choice" in shown
    assert "docstrings_choice" in (out / "page.html").read_text()
    assert sorted(p.name for p in out.iterdir()) == FILES
    with pytest.raises(OptionError, match="exist already: remove them"):
        run(options(micro, out))


def test_names_with_commas_between(micro, tmp_path, monkeypatch):
    """Each is a task by itself: in the folder's name, in the title, and in what a run that goes on must have."""
    monkeypatch.chdir(tmp_path)
    config = EvalConfig(model=str(micro), tasks=(f"{CHOICE},{TEXT}",), limit=2, device="cpu").check()
    assert config.folder == Path("docstrings_choice-docstrings_text.eval")
    run(config)
    assert "evaluated on docstrings_choice, docstrings_text<" in (config.folder / "page.html").read_text()
    source = resolve_trained(str(micro), "evaluate")
    manifest = _manifest(config, source, load_tokenizer(source))
    assert {f"the content of {name}" for name in (CHOICE, TEXT)} < manifest.keys()


@pytest.fixture(scope="module")
def whole(micro, tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("whole") / "e"
    run(options(micro, place))
    return place


def read(place: Path) -> tuple[dict, list[dict]]:
    """The summary and the records of a folder."""
    lines = (place / "records.jsonl").read_text().splitlines()
    return json.loads((place / "summary.json").read_text()), [json.loads(x, parse_constant=no_json) for x in lines]


def no_json(word: str) -> None:
    """Infinity and NaN, which Python alone takes for JSON."""
    raise AssertionError(word)


def test_records_and_curves(whole):
    summary, records = read(whole)
    expected = [("docstrings_choice", d, r) for d in range(11) for r in range(4)]
    expected += [(task, d, 0) for task in ("docstrings_text", "docstrings_word") for d in range(11)]
    assert [(x["task"], x["document"], x["request"]) for x in records] == expected
    assert summary["requests"] == summary["requests_answered_now"] == len(expected)
    assert summary["cut_requests"] == sum(x["cut"] > 0 for x in records) > 0
    tasks = {name: found["certainty"] for name, found in summary["tasks"].items()}

    choices = [[sum(x["logprob"]) for x in records[4 * d : 4 * d + 4]] for d in range(11)]
    p = torch.tensor(choices).double().softmax(-1)
    found = tasks["docstrings_choice"]
    assert found["of"] == "documents"
    assert sum(b["documents"] for b in found["bins"]) == 11
    assert sum(b["documents"] * b["confidence"] for b in found["bins"]) == pytest.approx(float(p.amax(-1).sum()))
    right = sum(b["documents"] * b["accuracy"] for b in found["bins"])
    assert right / 11 == pytest.approx(summary["tasks"]["docstrings_choice"]["metrics"]["acc"]["value"])
    entropy = float(-(p * p.log()).sum())
    assert sum(g["documents"] * g["mean"] for g in found["entropy"]["groups"]) == pytest.approx(entropy, rel=1e-5)

    texts = [x for x in records if x["task"] == "docstrings_text"]
    found = tasks["docstrings_text"]
    assert sum(b["tokens"] for b in found["bins"]) == sum(len(x["ids"]) for x in texts)
    right = sum(b["tokens"] * b["accuracy"] for b in found["bins"])
    assert right == pytest.approx(sum(rank == 1 for x in texts for rank in x["rank"]))
    assert tasks["docstrings_word"]["of"] == "documents"
    assert sum(b["documents"] for b in tasks["docstrings_word"]["bins"]) == 11


def test_the_page_has_plots_of_each_task(whole):
    page = (whole / "page.html").read_text()
    assert page.count("<svg") == 6
    for task in ("choice", "text", "word"):
        assert f"docstrings_{task}: reliability of" in page
        assert f"docstrings_{task}: accuracy by entropy of" in page
    assert "longer than the 64 tokens that the model sees" in page


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine (Debian: apt install chromium)")
def test_the_page_in_a_browser(whole, tmp_path):
    """Silent, legible, as wide as the screen, and each plot has its marks."""
    with chromium(tmp_path) as browser:
        for scheme, width in (("light", 360), ("dark", 1200)):
            browser.open(whole / "page.html", width=width, scheme=scheme)
            assert (browser.complaints, browser.requests) == ([], [])
            assert browser.evaluate("document.documentElement.scrollWidth") <= width
            assert min(contrast for _, contrast in browser.evaluate(CONTRAST)) >= 4.5
        marks = "[...document.querySelectorAll('svg')].map((s) => s.querySelectorAll('.bar, .point').length)"
        counts = browser.evaluate(marks)
    assert len(counts) == 6
    assert min(counts) >= 2


@pytest.fixture(scope="module")
def half(micro, tmp_path_factory) -> Path:
    """A run that was killed."""
    place = tmp_path_factory.mktemp("half") / "e"
    process = begin(_killed, options(micro, place))
    process.join(120)
    assert process.exitcode == -signal.SIGKILL
    assert [p.name for p in place.iterdir()] == ["summary.json.parts"]
    return place


def test_a_killed_run_goes_on(micro, half, whole, tmp_path):
    shutil.copytree(half, tmp_path / "e")
    with pytest.raises(OptionError, match="unfinished run with limit 11, now 12"):
        run(options(micro, tmp_path / "e", limit=12))
    lines = (half / "summary.json.parts" / "records.jsonl").read_text().count("\n")
    summary = run(options(micro, tmp_path / "e"))
    assert_same(tmp_path / "e", whole)
    assert summary["requests_answered_now"] == summary["requests"] - lines < summary["requests"]
    assert summary["requests_per_second"] == pytest.approx(
        summary["requests_answered_now"] / summary["seconds"], abs=0.06
    )  # of what this run answered, not of what it found


def _replaced(old: bytes, new: bytes) -> Callable[[Path], object]:
    def change(path: Path) -> None:
        before = path.read_bytes()
        assert old in before
        path.write_bytes(before.replace(old, new, 1))

    return change


def _as_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


RECORDS, CACHE = "records.jsonl", "answers_rank0.db"
DAMAGED: dict[str, tuple[str, Callable[[Path], object]]] = {
    "records lost": (RECORDS, Path.unlink),
    "records emptied": (RECORDS, lambda path: path.write_bytes(b"")),
    "a line that is none": (RECORDS, lambda path: path.write_bytes(b"\xff\n[]\n" + path.read_bytes())),
    "a number": (RECORDS, _replaced(b'"logprob": [-', b'"logprob": [-1')),
    "no number": (RECORDS, _replaced(b'"entropy": [', b'"entropy": [NaN, ')),
    "no key": (RECORDS, _replaced(b'"key"', b'"kez"')),
    "an answer": (RECORDS, _replaced(b'"answer": [-', b'"answer": [-1')),
    "the cache is garbage": (CACHE, lambda path: path.write_bytes(b"garbage" * 1000)),
    "the cache is cut": (CACHE, lambda path: path.write_bytes(path.read_bytes()[:3000])),
    "the cache is lost": (CACHE, Path.unlink),
    "the cache is a folder": (CACHE, _as_a_folder),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_killed_run_whose_answers_were_damaged_goes_on(damage, micro, half, whole, tmp_path, capsys):
    """What is not there as it was written is asked again."""
    shutil.copytree(half, tmp_path / "e")
    name, spoil = DAMAGED[damage]
    spoil(tmp_path / "e" / "summary.json.parts" / name)
    run(options(micro, tmp_path / "e"))
    assert_same(tmp_path / "e", whole)
    changed = damage in ("a line that is none", "a number", "no number", "no key", "an answer")
    assert ("unfinished or damaged: what they answered is asked again" in capsys.readouterr().err) == changed


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo])
def test_records_that_are_no_file(make, micro, half, tmp_path):
    shutil.copytree(half, tmp_path / "e")
    path = tmp_path / "e" / "summary.json.parts" / RECORDS
    path.unlink()
    make(path)
    with pytest.raises(DataError, match=r"records.jsonl: expected a file of records, got a folder.*: remove it"):
        run(options(micro, tmp_path / "e"))


def test_a_record_that_is_lost_at_the_end(micro, tmp_path, monkeypatch):
    def lose(self: Records, instance: Any, *given: Any) -> None:
        if instance.doc_id:
            write(self, instance, *given)

    write = Records.write
    with monkeypatch.context() as patch:
        patch.setattr(Records, "write", lose)
        with pytest.raises(DataError, match="lost the record of document 0 of task docstrings_word: the same command"):
            run(options(micro, tmp_path / "e", tasks=(WORD,)))
    run(options(micro, tmp_path / "e", tasks=(WORD,)))


def _killed(config: EvalConfig) -> None:
    torch.set_num_threads(1)
    answers, passes = continuations._answers, 0

    def then_die(*given: Any) -> Any:
        nonlocal passes
        passes += 1
        if passes == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return answers(*given)

    continuations._answers = then_die
    run(config)


def assert_same(place: Path, expected: Path) -> None:
    """All metrics, curves and records, none lost or doubled."""
    found, records = read(place)
    summary, expected_records = read(expected)
    for task, values in summary["tasks"].items():
        for metric, x in values["metrics"].items():
            assert found["tasks"][task]["metrics"][metric]["value"] == pytest.approx(x["value"], rel=1e-5)
        curves = [known["tasks"][task]["certainty"] for known in (found, summary)]
        assert len({sum(group[x["of"]] for group in x["bins"]) for x in curves}) == 1
        assert curves[0]["entropy"]["mean_where_wrong"] == pytest.approx(
            curves[1]["entropy"]["mean_where_wrong"], rel=1e-4
        )
    assert (found["requests"], found["options"]) == (summary["requests"], summary["options"])
    for x, y in zip(records, expected_records, strict=True):
        assert [x[name] for name in PLACE] == [y[name] for name in PLACE]
        assert x["logprob"] == pytest.approx(y["logprob"], rel=1e-4, abs=1e-6)
    assert sorted(p.name for p in place.iterdir()) == FILES


PLACE = ("task", "document", "request", "type", "cut", "ids")


def test_two_ranks_give_what_one_gives(micro, whole, tmp_path):
    """Eleven documents, so that the harness gives the second rank one of them twice."""
    torchrun("tests.workbench.evaluation.test_tasks", str(micro), str(tmp_path / "e"))
    assert read(tmp_path / "e")[0]["ranks"] == 2
    assert_same(tmp_path / "e", whole)


def test_ranks_that_were_killed_go_on(micro, whole, tmp_path):
    """One dies in the middle of whole texts, when the other has answered all of its own and has no more to ask."""
    with pytest.raises(AssertionError, match="SIGKILL"):
        torchrun("tests.workbench.evaluation.test_tasks", str(micro), str(tmp_path / "e"), "die")
    assert not (tmp_path / "e" / "summary.json").exists()
    torchrun("tests.workbench.evaluation.test_tasks", str(micro), str(tmp_path / "e"))
    assert_same(tmp_path / "e", whole)


def _die_after_the_other(place: Path) -> None:
    """Kills rank 1 in its third pass over whole texts, as soon as rank 0 has answered all of its six."""
    write, written = Records.write, 0

    def then_die(records: Records, instance: Any, *given: Any) -> None:
        nonlocal written
        write(records, instance, *given)
        written += instance.request_type == "loglikelihood_rolling"
        if written == 3:
            other = place / "summary.json.parts" / "records-0.jsonl"
            while other.read_text().count("loglikelihood_rolling") < 6:
                time.sleep(0.05)
            os.kill(os.getpid(), signal.SIGKILL)

    Records.write = then_die


def test_what_the_harness_says_in_its_own_way(micro, tmp_path, monkeypatch, capfd):
    """git's complaint that there is no repository here; a ValueError; and what a refused run has written."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(OptionError, match=r"^--num-fewshot 5000: more examples than a task has to show: give a lower"):
        run(options(micro, tmp_path / "e", num_fewshot=5000, json=tmp_path / "new" / "e.json"))
    assert list(tmp_path.iterdir()) == []
    run(options(micro, tmp_path / "e", tasks=(WORD,), limit=2, json=tmp_path / "new" / "e.json"))
    assert json.loads((tmp_path / "new" / "e.json").read_text())["requests"] == 2
    assert "fatal" not in capfd.readouterr().err


def test_tasks_that_cannot_be_loaded(micro, tmp_path):
    with pytest.raises(DataError, match=r"--tasks hellaswagg: lm-eval has no task .* did you mean .*hellaswag"):
        run(options(micro, tmp_path / "e", tasks=(f"{CHOICE},hellaswagg",)))
    broken = tmp_path / "broken.yaml"
    broken.write_text(
        "task: x\ndataset_path: json\ndataset_kwargs: {data_files: none.json}\noutput_type: loglikelihood\n"
    )
    with pytest.raises(DataError, match=r"--tasks .*broken.yaml: lm-eval cannot load it \("):
        run(options(micro, tmp_path / "e", tasks=(str(broken),)))
    assert not (tmp_path / "e").exists()


def task_of(folder, about, rows):
    """The file of a task named t, of rows of its own."""
    file = folder / "t.yaml"
    file.write_text(f"task: t\ncustom_dataset: !function data.read\ntest_split: test\n{about}")
    (folder / "data.py").write_text(
        f'from datasets import Dataset\ndef read(**_):\n    return {{"test": Dataset.from_list({rows!r})}}\n'
    )
    return str(file)


def test_a_document_without_a_continuation(micro, tmp_path):
    task = task_of(
        tmp_path,
        'output_type: loglikelihood\ndoc_to_text: "{{text}}"\ndoc_to_target: "{{word}}"\n'
        'metric_list: [{metric: acc}]\ntarget_delimiter: ""\n',
        [{"text": "a", "word": "b"}, {"text": "c", "word": ""}],
    )
    with pytest.raises(DataError, match="document 2 of task t: expected a continuation to score, got none"):
        run(options(micro, tmp_path / "e", tasks=(task,)))


def test_what_has_no_numbers(micro, tmp_path):
    """A text of no token, and texts of beams, for which a checkpoint asks: answers, and no record of beams."""
    task = task_of(
        tmp_path,
        'output_type: loglikelihood_rolling\ndoc_to_text: ""\ndoc_to_target: "{{text}}"\n'
        "metric_list: [{metric: byte_perplexity}]\n",
        [{"text": "abc"}, {"text": ""}],
    )
    beams = shutil.copytree(micro, tmp_path / "beams")
    known = json.loads((beams / "generation_config.json").read_text())
    (beams / "generation_config.json").write_text(json.dumps(known | {"num_beams": 2}))
    run(options(beams, tmp_path / "e", tasks=(task, WORD)))
    summary, records = read(tmp_path / "e")
    assert [len(x["ids"]) for x in records if x["task"] == "t"] == [3, 0]
    assert all(x["task"] == "t" for x in records)
    assert summary["tasks"]["docstrings_word"]["metrics"]


def test_a_model_that_gives_no_numbers(micro, tmp_path):
    """The document of the task is named, as a document of --data is."""
    model = AutoModelForCausalLM.from_pretrained(shutil.copytree(micro, tmp_path / "model"))
    with torch.no_grad():
        model.model.norm.weight.fill_(float("nan"))
    model.save_pretrained(tmp_path / "model")
    said = f"^--model {tmp_path}/model: the scores of document 0 of task docstrings_choice are not finite$"
    with pytest.raises(NotFiniteError, match=said):
        run(options(tmp_path / "model", tmp_path / "e", tasks=(CHOICE,)))
    assert not (tmp_path / "e").exists()


def test_an_impossible_choice_is_none(tmp_path):
    """It has no part in the entropy over the choices; a text with it has an infinite perplexity."""
    never = biased(tmp_path / "never", -torch.inf)
    summary = run(options(never, tmp_path / "e", tasks=(CHOICE, TEXT)))
    records = read(tmp_path / "e")[1]
    impossible = [x for x in records if x["task"] == "docstrings_choice" and None in x["logprob"]]
    choice, text = (summary["tasks"][f"docstrings_{name}"] for name in ("choice", "text"))
    assert 0 < len(impossible) < 11  # not all choices of a document
    assert sum(b["documents"] for b in choice["certainty"]["bins"]) == 11
    assert all(math.isfinite(g["mean"]) for g in choice["certainty"]["entropy"]["groups"])
    assert text["metrics"]["word_perplexity"]["value"] == math.inf
    assert list(_of_choices({"acc": 0.0, "resps": [[(-math.inf, False)]] * 2})) == []


def test_more_ranks_than_documents(micro, tmp_path):
    said = "OptionError: --tasks docstrings_choice: 1 document for 2 ranks: start fewer ranks, or give a higher --limit"
    with pytest.raises(AssertionError, match=said):
        torchrun("tests.workbench.evaluation.test_tasks", str(micro), str(tmp_path / "e"), "few")


if __name__ == "__main__":
    import sys

    if "die" in sys.argv and os.environ["RANK"] == "1":
        _die_after_the_other(Path(sys.argv[2]))
    run(options(Path(sys.argv[1]), Path(sys.argv[2]), **({"limit": 1} if "few" in sys.argv else {})))
