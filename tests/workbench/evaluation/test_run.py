"""Whole evaluations: every number against the models' own logits in float64, after a kill, over ranks."""

import json
import math
import re
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM

from logitless.errors import DataError, NotFiniteError, OptionError
from logitless.units import format_perplexity
from logitless.workbench.evaluation.config import EvalConfig
from logitless.workbench.evaluation.measure import DIVERGENCES
from logitless.workbench.evaluation.page import page
from logitless.workbench.evaluation.report import table_rows
from logitless.workbench.evaluation.run import run
from logitless.workbench.scoring import block, documents
from tests.support.integrations.launching import leave, torchrun
from tests.support.workbench.killing import killed
from tests.support.workbench.micro import micro_directory, micro_model
from tests.workbench.evaluation.conftest import LETTERS, biased, drawn, lettered, options
from tests.workbench.scoring.conftest import corpus

FILES = ["documents.jsonl", "page.html", "summary.json", "tokens.parquet"]
TIMES = {"seconds", "tokens_per_second", "peak_memory_bytes", "tokens_scored_now", "ranks", "out"}


@pytest.fixture(scope="module")
def evaluated(micro, near, tmp_path_factory) -> tuple[dict, Path, list[dict]]:
    """(summary, its folder, dense rows) of short documents, each of one window."""
    place = tmp_path_factory.mktemp("dense")
    model = lettered().eval()
    lines = [drawn(model, 2 + i * 5 % 50, seed=i) for i in range(25)]
    data = place / "a.jsonl"
    data.write_text("".join(json.dumps({"text": text}) + "\n" for text in lines))
    summary = run(options(micro, data, place / "e", against=str(near), context_length=64, top_k=(3, 20), bins=7))
    rows = pq.read_table(place / "e" / "tokens.parquet").to_pylist()
    models = [AutoModelForCausalLM.from_pretrained(m).double().eval() for m in (micro, near)]
    return summary, place / "e", dense_rows(rows, *models)


def dense_rows(rows: list[dict], model: torch.nn.Module, other: torch.nn.Module) -> list[dict]:
    """What whole float64 logits of both say of each token that has one before it."""
    texts: dict[int, list[int]] = {}
    for row in rows:
        texts.setdefault(row["document"], []).append(row["token"])
    out = []
    for document, ids in texts.items():
        with torch.no_grad():
            p, q = (m(torch.tensor([ids])).logits[0].log_softmax(-1) for m in (model, other))
        mixture = torch.logaddexp(p, q) - math.log(2)
        pairs = ((p, q), (q, p), (p, mixture), (q, mixture))
        divergences = torch.stack([(a.exp() * (a - b)).sum(-1) for a, b in pairs], -1).tolist()
        for at, token in enumerate(ids[1:]):
            kl, reverse, mine, theirs = divergences[at]
            out.append(
                {
                    "document": document,
                    "context": at + 1,
                    "logprob": float(p[at, token]),
                    "rank": 1 + int((p[at] > p[at, token]).sum()),
                    "confidence": float(p[at].max().exp()),
                    "entropy": -float((p[at].exp() * p[at]).sum()),
                    "self_certainty": -float(p[at].mean()) - math.log(p.shape[-1]),
                    "against_logprob": float(q[at, token]),
                    "kl": kl,
                    "reverse_kl": reverse,
                    "jsd": (mine + theirs) / 2,
                    "agrees": bool(p[at].argmax() == q[at].argmax()),
                }
            )
    return out


def column(rows: list[dict], name: str) -> np.ndarray:
    return np.array([row[name] for row in rows], dtype=np.float64)


def test_every_row_is_what_dense_logits_say(evaluated):
    _, folder, dense = evaluated
    found = [row for row in pq.read_table(folder / "tokens.parquet").to_pylist() if row["logprob"] is not None]
    assert len(found) == len(dense) > 400
    for name in dense[0]:
        np.testing.assert_allclose(column(found, name), column(dense, name), atol=1e-5, err_msg=name)


def expected(rows: list[dict]) -> dict[str, float]:
    rank, nats = column(rows, "rank"), -column(rows, "logprob")
    theirs = -column(rows, "against_logprob")
    return {
        "perplexity": math.exp(nats.mean()),
        "bits_per_byte": nats.mean() / math.log(2),  # a token is a byte
        "accuracy": (rank == 1).mean(),
        "top_3": (rank <= 3).mean(),
        "top_20": (rank <= 20).mean(),
        "entropy": column(rows, "entropy").mean(),
        "self_certainty": column(rows, "self_certainty").mean(),
        "other": math.exp(theirs.mean()),
        "ratio": math.exp(nats.mean() - theirs.mean()),
        "kl": column(rows, "kl").mean(),
        "reverse_kl": column(rows, "reverse_kl").mean(),
        "jsd": column(rows, "jsd").mean(),
        "agreement": column(rows, "agrees").mean(),
    }


def numbers(found: dict) -> dict[str, float]:
    compared, within = found["compared"], found["top_k_accuracy"]
    names = ("perplexity", "bits_per_byte", "accuracy", "entropy", "self_certainty")
    return {name: found[name] for name in names} | {
        "top_3": within["3"],
        "top_20": within["20"],
        "other": compared["perplexity"],
        "ratio": compared["perplexity_ratio"],
        **{name: compared[name] for name in ("kl", "reverse_kl", "jsd", "agreement")},
    }


def test_totals_and_documents_are_means_of_dense_rows(evaluated):
    summary, folder, dense = evaluated
    assert summary["scored_tokens"] == len(dense)
    assert numbers(summary) == pytest.approx(expected(dense), rel=1e-5, abs=1e-7)
    lines = [json.loads(line) for line in (folder / "documents.jsonl").read_text().splitlines()]
    assert [line["document"] for line in lines] == list(range(25))
    for line in lines:
        rows = [row for row in dense if row["document"] == line["document"]]
        assert numbers(line) == pytest.approx(expected(rows), rel=1e-5, abs=1e-6)
    spread = [line["nats_per_token"] for line in lines]
    assert summary["by_document"]["perplexity"]["0.5"] == pytest.approx(math.exp(np.median(spread)))
    assert sum(summary["by_document"]["nats_per_token"]["documents"]) == 25
    highest = [record["nats_per_token"] for record in summary["by_document"]["highest"]]
    assert highest == sorted(spread, reverse=True)[:10]


def test_calibration_is_that_of_dense_rows(evaluated):
    summary, _, dense = evaluated
    confidence, correct = column(dense, "confidence"), column(dense, "rank") == 1
    assert confidence.max() > 0.5
    error = 0.0
    for b in range(7):
        here = (confidence >= b / 7) & (confidence < (b + 1) / 7)
        if not here.any():
            assert not [x for x in summary["calibration"]["bins"] if x["from"] == b / 7]
            continue
        (found,) = (x for x in summary["calibration"]["bins"] if x["from"] == b / 7)
        assert (found["tokens"], found["accuracy"]) == (here.sum(), pytest.approx(correct[here].mean()))
        assert found["confidence"] == pytest.approx(confidence[here].mean(), abs=1e-5)
        error += here.mean() * abs(correct[here].mean() - confidence[here].mean())
    assert summary["calibration"]["expected_calibration_error"] == pytest.approx(error, abs=1e-5)


@pytest.mark.parametrize("name", ["entropy", "self_certainty"])
def test_a_number_against_correctness(evaluated, name):
    summary, _, dense = evaluated
    found, values, correct = summary["against_correctness"][name], column(dense, name), column(dense, "rank") == 1
    assert found["mean_where_right"] == pytest.approx(values[correct].mean(), abs=1e-5)
    assert found["mean_where_wrong"] == pytest.approx(values[~correct].mean(), abs=1e-5)
    right, wrong = values[correct][:, None], values[~correct][None]
    assert found["auroc"] == pytest.approx((right > wrong).mean(), abs=0.01)
    groups = found["groups"]
    assert sum(g["tokens"] for g in groups) == len(dense)
    assert sum(g["tokens"] * g["accuracy"] for g in groups) == pytest.approx(correct.sum())
    assert [g["mean"] for g in groups] == sorted(g["mean"] for g in groups)


def test_divergences_are_spread_as_dense_ones(evaluated):
    summary, _, dense = evaluated
    for name in ("kl", "reverse_kl", "jsd"):
        for share, found in summary["divergences"][name].items():
            exact = np.quantile(column(dense, name), float(share), method="inverted_cdf")
            assert found == pytest.approx(exact, rel=3e-5 if share == "1" else 0.02), (name, share)


def test_context_is_counted_in_doublings(evaluated):
    summary, _, dense = evaluated
    context, nats = column(dense, "context"), -column(dense, "logprob")
    for x in summary["by_context"]:
        here = (context >= x["from"]) & (context <= x["to"])
        assert (x["tokens"], x["nats_per_token"]) == (here.sum(), pytest.approx(nats[here].mean(), abs=1e-5))
    assert sum(x["tokens"] for x in summary["by_context"]) == len(dense)


def test_a_model_is_no_distance_from_itself(micro, tmp_path):
    data = corpus(tmp_path / "a.jsonl", 8)
    alone = run(options(micro, data, tmp_path / "alone"))
    found = run(options(micro, data, tmp_path / "two", against=str(micro)))
    assert found["compared"]["agreement"] == 1
    assert found["compared"]["perplexity_ratio"] == pytest.approx(1, abs=1e-7)
    assert max(found["compared"][name] for name in ("kl", "reverse_kl", "jsd")) < 1e-9
    assert found["perplexity"] == pytest.approx(alone["perplexity"], rel=1e-6)
    assert "compared" not in alone


@pytest.fixture(scope="module")
def whole(micro, near, tmp_path_factory) -> tuple[Path, Path]:
    """A corpus, and the folder of a run that nobody disturbed."""
    place = tmp_path_factory.mktemp("whole")
    data = corpus(place / "a.jsonl")
    assert killed("never", options(micro, data, place / "e", against=str(near))) == 0
    return data, place / "e"


def untimed(folder: Path) -> dict:
    summary = json.loads((folder / "summary.json").read_text())
    return {name: value for name, value in summary.items() if name not in TIMES}


def same(folder: Path, other: Path) -> bool:
    for name in ("tokens.parquet", "documents.jsonl"):
        assert (folder / name).read_bytes() == (other / name).read_bytes()
    return untimed(folder) == untimed(other)


def test_a_killed_run_goes_on_with_nothing_lost_or_doubled(micro, near, whole, tmp_path):
    data, expected = whole
    config = options(micro, data, tmp_path / "e", against=str(near))
    for after in (2, "merge"):  # parts written before the kill; then in the middle of tokens.parquet
        assert killed(after, config) == -signal.SIGKILL
        assert not (tmp_path / "e" / "summary.json").exists()
    assert killed("never", config) == 0
    assert same(tmp_path / "e", expected)
    assert sorted(p.name for p in (tmp_path / "e").iterdir()) == FILES


def test_a_run_that_ends_before_its_page_makes_it_anew(micro, near, whole, tmp_path, monkeypatch, small_blocks):
    data, expected = whole
    config = options(micro, data, tmp_path / "e", against=str(near))
    config = replace(config, json=tmp_path / "e.json")
    for last in ("evaluation.run.page", "scoring.summary.write_json"):
        with monkeypatch.context() as stopped:
            stopped.setattr(f"logitless.workbench.{last}", _interrupt)
            with pytest.raises(KeyboardInterrupt):
                run(config)
    assert not config.json.exists()
    with pytest.raises(OptionError, match="unfinished run with against"):
        run(replace(config, against=None))
    summary = run(config)
    assert json.loads(config.json.read_text()) == summary
    assert same(tmp_path / "e", expected)
    with pytest.raises(OptionError, match=r"^--out .*/tokens.parquet, .* exist already: remove them, or choose"):
        run(config)


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.slow
def test_two_ranks_give_what_one_gives(micro, near, whole, tmp_path):
    data, expected = whole
    torchrun("tests.workbench.evaluation.test_run", str(micro), str(data), str(tmp_path / "e"), str(near))
    assert same(tmp_path / "e", expected)


def test_ranks_above_the_vocabulary_are_refused(micro, tmp_path, monkeypatch):
    data = corpus(tmp_path / "a.jsonl", 3)
    with pytest.raises(OptionError, match=r"^--top-k must be at most the vocabulary, here 259, got 260$"):
        run(options(micro, data, tmp_path / "e", top_k=(5, 260)))
    assert not (tmp_path / "e").exists()
    assert run(options(micro, data, tmp_path / "e", top_k=(259,)))["top_k_accuracy"] == {"259": 1.0}
    monkeypatch.setattr(EvalConfig, "top_k", (260,))  # the default, of a model that has fewer entries
    assert run(options(micro, data, tmp_path / "f", top_k=(260,)))["top_k_accuracy"] == {"260": 1.0}


def test_models_that_cannot_be_compared(micro, tmp_path):
    data = corpus(tmp_path / "a.jsonl", 3)
    for name, changes in (("padded", {"vocab_size": 264}), ("other", {})):
        (tmp_path / name).mkdir()
        micro_directory(tmp_path / name)
        micro_model(**changes).save_pretrained(tmp_path / name)
    with pytest.raises(OptionError, match="expected a vocabulary of 259 entries as --model has, got 264"):
        run(options(micro, data, tmp_path / "e", against=str(tmp_path / "padded")))
    place = tmp_path / "other" / "tokenizer.json"
    place.write_text(place.read_text().replace('"a"', '"\u00e9"', 1))
    with pytest.raises(OptionError, match="expected the tokenizer of --model, got one with other entries"):
        run(options(micro, data, tmp_path / "e", against=str(tmp_path / "other")))


def test_a_document_without_numbers_in_the_other_model_is_reported(micro, tmp_path):
    shutil.copytree(micro, tmp_path / "other")
    model = AutoModelForCausalLM.from_pretrained(micro)
    with torch.no_grad():
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.clone())
        model.model.embed_tokens.weight[LETTERS.start + 25] = float("nan")  # z, which one document has
    model.config.tie_word_embeddings = False
    model.save_pretrained(tmp_path / "other")
    (tmp_path / "a.jsonl").write_text('{"text": "abcd"}\n{"text": "abzd"}\n')
    summary = run(options(micro, tmp_path / "a.jsonl", tmp_path / "e", against=str(tmp_path / "other")))
    assert (summary["skipped"], summary["scored_tokens"]) == (1, 3)
    assert summary["skipped_documents"][0]["why"] == "its scores by --against are not finite"
    assert math.isfinite(summary["compared"]["kl"])
    (tmp_path / "b.jsonl").write_text('{"text": "azcd"}\n')
    with pytest.raises(NotFiniteError, match=rf"^--against {tmp_path}/other: the scores of 1 document are not finite"):
        run(options(micro, tmp_path / "b.jsonl", tmp_path / "f", against=str(tmp_path / "other")))


def test_an_impossible_token_leaves_its_document_no_scores(tmp_path):
    """A bias takes a byte away: self-certainty, and KL to such a model, are then infinite everywhere."""
    never, whole = biased(tmp_path / "never", -torch.inf), biased(tmp_path / "whole", 0.0)
    (tmp_path / "a.jsonl").write_text('{"text": "abcd"}\n{"text": "abzd"}\n')
    alone = run(options(never, tmp_path / "a.jsonl", tmp_path / "e"))
    below = run(options(whole, tmp_path / "a.jsonl", tmp_path / "f", against=str(never)))
    above = run(options(never, tmp_path / "a.jsonl", tmp_path / "g", against=str(whole)))
    for summary, why in ((alone, ""), (below, "by --against "), (above, "")):
        assert (summary["skipped"], summary["scored_tokens"]) == (1, 3)
        assert summary["skipped_documents"][0]["why"] == f"its scores {why}are not finite"
        assert math.isfinite(summary["perplexity"])
    for summary, infinite in ((below, "kl"), (above, "reverse_kl")):
        for name in DIVERGENCES:
            assert math.isfinite(summary["compared"][name]) == (name != infinite)
            assert math.isfinite(summary["divergences"][name]["0.5"]) == (name != infinite)


@pytest.mark.parametrize(
    ("option", "name"),
    [
        ("json", "summary.json"),
        ("json", "tokens.parquet.parts/x"),
        ("data", "documents.jsonl"),
        ("against", "page.html"),
    ],
)
def test_nothing_else_is_among_what_is_written(micro, tmp_path, option, name):
    given = options(micro, corpus(tmp_path / "a.jsonl", 2), tmp_path / "e")
    place = tmp_path / "e" / name
    with pytest.raises(OptionError, match=f"--{option} .* is among what the run itself writes into"):
        run(replace(given, **{option: place if option == "json" else str(place)}))
    assert not (tmp_path / "e").exists()


def test_json_is_not_the_folder(micro, tmp_path):
    given = options(micro, corpus(tmp_path / "a.jsonl", 2), tmp_path / "e" / "f")
    for place in (tmp_path / "e", tmp_path / "e" / "f"):
        with pytest.raises(OptionError, match=f"--json {place}: expected a file, got the folder that the run writes"):
            run(replace(given, json=place))
    assert not (tmp_path / "e").exists()


def test_documents_are_not_written_over(micro, tmp_path):
    """What eval writes into its folder is as little a document's place as --json."""
    place = tmp_path / "texts" / "deeper"
    for name in FILES[:-1]:
        place.mkdir(parents=True)
        (place / name).write_text("a document")
        with pytest.raises(OptionError, match=f"--out {place / name} would overwrite what --data .* reads: write"):
            options(micro, tmp_path / "texts", place).check()
        shutil.rmtree(place)
    options(micro, tmp_path, tmp_path / "texts").check()


@pytest.mark.parametrize("name", FILES)
def test_what_lies_in_the_folder_is_not_written_over(micro, tmp_path, name):
    """As an evaluation of tasks, or a page of somebody's own."""
    place = tmp_path / "e"
    place.mkdir()
    (place / name).write_text("mine")
    with pytest.raises(OptionError, match=f"^--out {place / name} exists already: remove it, or choose another$"):
        run(options(micro, corpus(tmp_path / "a.jsonl", 2), place))
    assert {path.name: path.read_text() for path in place.iterdir()} == {name: "mine"}


@pytest.mark.parametrize(("data", "out"), [("corpus", "."), ("corpus/texts", "corpus"), ("corpus", "corpus")])
def test_the_folder_may_be_the_texts_own_or_above_it(micro, tmp_path, monkeypatch, data, out):
    """No document was found there; what an unfinished run has written is none of its documents."""
    monkeypatch.chdir(tmp_path)
    Path(data).mkdir(parents=True)
    Path(data, "a.txt").write_text("abc")
    given = options(micro, Path(data), Path(out))
    with monkeypatch.context() as stopped:
        stopped.setattr("logitless.workbench.scoring.summary.write_json", _interrupt)
        with pytest.raises(KeyboardInterrupt):
            run(replace(given, json=Path(out, "e.json")))
    assert run(given)["documents"] == 1
    assert json.loads(Path(out, "documents.jsonl").read_text())["name"] == f"{data}/a.txt"


def test_texts_of_one_token_have_nothing_to_evaluate(micro, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n{"text": ""}\n')
    with pytest.raises(DataError, match=r"no token to score in 2 documents; .*a.jsonl:2: empty"):
        run(options(micro, tmp_path / "a.jsonl", tmp_path / "e"))
    assert not (tmp_path / "e").exists()
    summary = run(options(micro, tmp_path / "a.jsonl", tmp_path / "e", bos="yes"))
    assert summary["scored_tokens"] == 1


COMPARED = (*DIVERGENCES, "perplexity", "perplexity_ratio")


def test_the_page_counts_documents_with_a_score_and_shows_any_perplexity(micro, tmp_path):
    texts = ["ab", "", "x"]  # one has a score, one is skipped, one has a single token
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    summary = run(options(micro, tmp_path / "a.jsonl", tmp_path / "e"))
    assert "of 1 token in 1 document<" in page(summary)
    assert "by document" not in dict(table_rows(summary))  # nothing is spread among one
    huge = {**summary, "perplexity": 1.5e304, "compared": {**dict.fromkeys(COMPARED, 1e304), "agreement": 1.0}}
    huge["options"] = {**summary["options"], "against": "other"}
    huge["divergences"] = {name: {"0.99": 1.0, "1": 1.0} for name in DIVERGENCES}
    hardest = {**summary["by_document"]["highest"][0], "perplexity": 1e304}
    huge["by_document"] = {**summary["by_document"], "highest": [hardest]}
    shown = page(huge)
    assert shown.count("1e+304") >= 4
    assert "1.5e+304" in shown
    assert not re.search(r"\d{1,3}(,\d{3}){4}", shown)


def test_the_table_and_the_page_say_what_the_summary_does(evaluated):
    summary, *_ = evaluated
    rows = dict(table_rows(summary))
    for name in ("entropy", "self_certainty"):
        found = summary["against_correctness"][name]
        sides = f"{found['mean_where_wrong']:.4g} where wrong, {found['mean_where_right']:.4g} where right"
        assert rows[name.replace("_", "-")] == f"{summary[name]:.4f} nats; {sides}"
    low, middle, high = (
        format_perplexity(summary["by_document"]["perplexity"][share]) for share in ("0.1", "0.5", "0.9")
    )
    assert rows["by document"] == f"perplexity {middle} in the median, {low} to {high} in eight of ten"
    best = ", ".join(f"{x:.2%} in the best {k}" for k, x in summary["top_k_accuracy"].items())
    assert rows["accuracy"] == f"{summary['accuracy']:.2%}; {best}"
    spread, agreement = summary["divergences"]["kl"], summary["compared"]["agreement"]
    tokens = f"99 % of tokens up to {spread['0.99']:.3g}, at most {spread['1']:.3g}"
    assert rows["KL"] == f"{summary['compared']['kl']:.4g} nats; {tokens}"
    assert rows["same best entry"] == f"{agreement:.3%} of tokens"
    shown, options = page(summary), summary["options"]
    assert f"{options['model']} against {options['against']}, evaluated on {Path(options['data']).name}" in shown
    assert f'accuracy</p><p class="number">{summary["accuracy"]:.1%}<' in shown
    assert f'same best entry</p><p class="number">{agreement:.2%}<' in shown
    assert re.findall("<h2>([^<]*)</h2><svg", shown) == [
        *("Reliability", "Accuracy by entropy", "Accuracy by self-certainty", "Documents", "By context")
    ]
    hardest = summary["by_document"]["highest"][0]
    cells = f"{format_perplexity(hardest['perplexity'])} {hardest['scored_tokens']:,} {hardest['bits_per_byte']:.3f}"
    row = "</td><td>".join([*cells.split(), f"{hardest['accuracy']:.1%}"])
    assert f"{hardest['name']}</th><td>{row}</td>" in shown


@pytest.mark.parametrize(("ratio", "said"), [(3.2e-7, "3.2e-07"), (0.99996, "0.99996"), (1.0000314, "1.00003")])
def test_the_page_says_the_ratio_as_the_table_does(evaluated, ratio, said):
    """Its tile had four decimals: 0.0000 of a small one, and 1.0000 of one that the table tells from 1."""
    summary, *_ = evaluated
    shown = page({**summary, "compared": {**summary["compared"], "perplexity_ratio": ratio}})
    assert f'ratio of perplexities</p><p class="number">{said}<' in shown
    assert f"ours is {said} times that" in shown


if __name__ == "__main__":
    import sys

    documents.PIECE = block.PIECE = 400
    model, data, out, other = map(Path, sys.argv[1:])
    run(options(model, data, out, against=str(other)))
    leave()


def test_the_default_folder_keeps_what_looks_like_a_suffix():
    given = EvalConfig(tasks=("mine/a-v1.5.yaml", "b-v1.5"))
    assert given.folder == Path("a-v1.5-b-v1.5.eval")
