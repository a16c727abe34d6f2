"""`logitless verify`: its table, and that it can fail."""

import json

import pytest
import torch

from logitless.algebra.costs import DEFAULT_BUDGET
from logitless.cli.main import main
from logitless.workbench.common import device
from logitless.workbench.sft import verify
from logitless.workbench.sft.config import TrainConfig
from tests.support.workbench.units import assert_one_unit

SMALL = ["--vocab-size", "1000"]


def test_the_default_lengths_and_threshold(monkeypatch, capsys):
    monkeypatch.setattr(verify, "checks", lambda *_: [verify.Check("value", 0.0, 1e-6)])
    assert main(["verify", "--json", "-"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["schema"] == 1
    assert report["vocab_size"] == 151_936
    assert [(c["length"], round(c["logits_bytes"] / 2**30, 2), c["method"]) for c in report["choices"]] == [
        (512, 0.14, "dense"),
        (4096, 1.16, "logitless"),
        (40_000, 11.32, "logitless"),
        (131_072, 37.09, "logitless"),
    ]


def test_the_default_threshold_is_where_train_starts_to_stream(monkeypatch, capsys):
    monkeypatch.setattr(verify, "checks", lambda *_: [])
    assert main(["verify", "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["threshold_bytes"] == DEFAULT_BUDGET == TrainConfig().memory_budget_bytes


def test_the_default_threshold_is_that_of_the_device(monkeypatch, capsys):
    asked = []
    monkeypatch.setattr(verify, "checks", lambda *_: [])
    monkeypatch.setattr(device, "default_budget", lambda found: asked.append(found.type) or 1 << 30)
    assert main(["verify", "--sequence-lengths", "2048", "--json", "-"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (asked, report["threshold_bytes"], report["choices"][0]["method"]) == (["cpu"], 1 << 30, "dense")
    assert main(["verify", "--sequence-lengths", "2048"]) == 0
    assert "threshold 1.00 GiB" in capsys.readouterr().out


def test_json_into_a_file(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(verify, "checks", lambda *_: [])
    lengths = ["--sequence-lengths", "8", "9", "--sequence-lengths", "7"]
    assert main(["verify", "--json", str(tmp_path / "v.json"), *lengths]) == 0
    assert [c["length"] for c in json.loads((tmp_path / "v.json").read_text())["choices"]] == [8, 9, 7]
    assert "agree" in capsys.readouterr().out  # the tables are shown beside the file


def test_equal_losses_pass(capsys):
    assert main(["verify", *SMALL, "--sequence-lengths", "8", "100000", "--loss-threshold", "100MB"]) == 0
    out = capsys.readouterr().out
    assert "value and gradients agree" in out
    assert out.count("equal") == 12
    assert "dense" in out
    assert "logitless" in out
    assert_one_unit(out, "logits' size", "Logitless loss")


@pytest.mark.parametrize("part", ["value", "gradient", "nan"])
def test_different_losses_fail(monkeypatch, capsys, part):
    right = verify.linear_cross_entropy

    def wrong(hidden, head, labels, **options):
        if part == "gradient":
            hidden = hidden + 1e-4 * (hidden - hidden.detach())  # the value stays, the gradient is 1e-4 off
        loss = right(hidden, head, labels, **options)
        return loss * (float("nan") if part == "nan" else 1 + 1e-5 if part == "value" else 1)

    monkeypatch.setattr(verify, "linear_cross_entropy", wrong)
    assert main(["verify", *SMALL]) == 1
    assert "DIFFERENT" in capsys.readouterr().out


def test_what_is_compared(monkeypatch):
    """Tokens that are ignored and both ends of the vocabulary, in slices that end everywhere."""
    given = []

    def loss(hidden, head, labels, **options):
        given.append((labels.tolist(), options["memory_budget"]))
        return verify.dense_cross_entropy(hidden, head, labels, reduction=options["reduction"])

    monkeypatch.setattr(verify, "linear_cross_entropy", loss)
    verify.checks(1000, torch.device("cpu"))
    assert len(given) == 4
    for labels, budget in given:
        assert (labels[0], labels[-1], labels.count(-100)) == (0, 999, 11)
        assert budget == 64 * 1000 * 4 // 7


def test_no_number_is_an_error_without_end():
    one = torch.ones(2)
    assert verify._relative(torch.tensor([1.0, 1.5]), 2 * one) == 0.5
    for wrong in (None, one * float("nan")):
        assert verify._relative(wrong, one) == float("inf")


def test_the_check_fits_for_any_vocabulary():
    for vocab in (2, 1000, 151_936, 10**7):
        assert 2 <= verify.check_size(vocab) <= verify.TOKENS
        assert verify.check_size(vocab) * vocab * 8 <= verify.DENSE_BYTES
    assert [verify.check_size(vocab) for vocab in (1000, 151_936, 10**7, 10**8)] == [64, 64, 3, 2]
    assert all(check.holds for check in verify.checks(7, torch.device("cpu")))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--loss-threshold", "lots"], "--loss-threshold must be a size"),
        (["--loss-threshold", "10"], "--loss-threshold must be 1000 bytes or more, got '10'"),
        (["--json"], "Expected 1 value (see logitless verify --help)"),
        (["--vocab-size", "1"], "--vocab-size must be at least 2"),
        (["--json", "/nowhere/v.json"], "the folder /nowhere does not exist"),
        (["--sequence-lengths", "0"], "--sequence-lengths must be at least 2"),
    ],
)
def test_bad_options(given, message, capsys):
    assert main(["verify", *given]) == 2
    assert message in capsys.readouterr().err
