"""`logitless profile`: output, files, exit statuses, and one line for every mistake."""

import json

import pytest
import torch

from logitless.cli.main import main
from logitless.workbench.profile.recording import FEW, POINTS
from tests.support.workbench.units import assert_one_unit

pytestmark = pytest.mark.compiled  # fake tensors hold nothing to poison

SMALL = {
    "model_type": "qwen3",
    "vocab_size": 4096,
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "tie_word_embeddings": True,
}
STAGES = [
    "parameters",
    "optimizer state",
    "after embedding",
    "after first layer",
    "after full forward",
    "loss",
    "backward",
    "optimizer",
]


@pytest.fixture
def model(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    path = tmp_path / "config.json"
    path.write_text(json.dumps(SMALL))
    return str(path)


def test_tables(model, capsys):
    assert main(["profile", "--model", model, "--context-length", "512", "--savings", "all", "--real", "cpu"]) == 0
    out = capsys.readouterr().out
    for text in (
        *STAGES,
        "logitless",
        "at its end",
        "dense peaks at",
        "largest tensors at the peak, logitless",
        "optimizer state",
        "loss workspace",
        "savings, each traced",
        "half-context",
        "lora",
        "predicted against a real run on cpu",
        "resident set",
    ):
        assert text in out, text
    for begin, end in (
        ("at its end", "largest tensors"),  # the sentences about the tables too
        ("largest tensors", "savings, each"),
        ("savings, each", "predicted against"),
    ):
        assert_one_unit(out, begin, end)
    assert_one_unit(out + "\nend", "predicted against", "\nend")
    assert "--savings all" not in out


def test_what_would_help_is_named_where_it_was_not_asked_for(model, capsys):
    assert main(["profile", "--model", model, "--context-length", "64", "--mlp-tiles", "2"]) == 0
    offer = capsys.readouterr().out.partition("--savings all also traces the step with each")[2]
    assert offer.split(": ")[1].split() == ["checkpointing,", "offload,", "lora,", "half-context"]


def test_a_saving_that_a_model_refuses_leaves_the_others(model, tmp_path, capsys):
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    (tmp_path / "config.json").write_text(json.dumps({**SMALL, "model_type": "qwen3_moe", **experts}))
    given = ["--model", model, "--context-length", "64", "--savings", "all", "--json", str(tmp_path / "profile.json")]
    assert main(["profile", *given]) == 0
    (refused,) = json.loads((tmp_path / "profile.json").read_text())["refused_savings"].items()
    out = " ".join(capsys.readouterr().out.split())
    assert f"no {refused[0]}: {refused[1]}" in out
    assert "no tiled-mlp: --mlp-tiles needs dense MLPs: Qwen3MoeForCausalLM has layers that route" in out
    assert all(name in out for name in ("checkpointing", "offload", "lora", "half-context"))


def test_json(model, capsys):
    arguments = ["--model", model, "--context-length", "256", "--gradient-checkpointing"]
    arguments += ["--savings", "lora", "--savings", "half-context", "--memory-budget", "2MiB"]
    assert main(["profile", *arguments, "--real", "cpu", "--json", "-"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found) == {"schema", "kind", "step", "parameters", "runs", "savings", "refused_savings", "real"}
    assert (found["schema"], found["kind"]) == (1, "profile")
    assert found["step"]["gradient_checkpointing"] is True
    assert found["step"]["memory_budget"] == 2 << 20
    assert list(found["runs"]) == ["dense", "logitless"]
    for one in found["runs"].values():
        assert set(one) == {"stages", "peak", "host_peak_bytes", "timeline", "lint"}
        assert [s["name"] for s in one["stages"]] == STAGES
        assert one["peak"]["bytes"] == max(s["peak_bytes"] for s in one["stages"])
        assert len(one["timeline"]) <= POINTS + FEW * len(STAGES)
    assert {saving["saving"] for saving in found["savings"]} == {"lora", "half-context"}
    for saving in found["savings"]:
        assert saving["saved_bytes"] == found["runs"]["logitless"]["peak"]["bytes"] - saving["peak"]["bytes"]
    assert set(found["real"]["stages"][0]) == {
        "name",
        "predicted_bytes",
        "predicted_peak_bytes",
        "allocated_bytes",
        "allocated_peak_bytes",
        "measured_bytes",
        "measured_peak_bytes",
    }


def test_files(model, tmp_path):
    given = ["--json", str(tmp_path / "p.json"), "--png", str(tmp_path / "p.png"), "--html", str(tmp_path / "p.html")]
    assert main(["profile", "--model", model, "--context-length", "64", "--optimizer", "none", *given]) == 0
    assert json.loads((tmp_path / "p.json").read_text())["real"] is None
    page = (tmp_path / "p.html").read_text(encoding="utf-8")
    assert all(f'"{name}"' in page for name in ("runs", "dense", "logitless", *STAGES[2:5]))
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


def test_the_loss_that_is_asked_for_is_what_is_looked_into(model, tmp_path, capsys):
    given = ["--context-length", "512", "--loss", "dense", "--savings", "logitless-loss"]
    assert main(["profile", "--model", model, *given, "--json", str(tmp_path / "p.json")]) == 0
    assert "largest tensors at the peak, dense" in capsys.readouterr().out
    found = json.loads((tmp_path / "p.json").read_text())
    dense, ours = (found["runs"][loss]["peak"]["bytes"] for loss in ("dense", "logitless"))
    assert [saving["saved_bytes"] for saving in found["savings"]] == [dense - ours]
    assert dense > ours


def test_files_are_in_the_units_that_are_asked_for(model, tmp_path, monkeypatch):
    monkeypatch.setattr("logitless.workbench.profile.timeline.draw", lambda _, path, __, units: path.write_text(units))
    given = ["--png", str(tmp_path / "p.png"), "--html", str(tmp_path / "p.html"), "--units", "GB"]
    assert main(["profile", "--model", model, "--context-length", "64", "--optimizer", "none", *given]) == 0
    assert (tmp_path / "p.png").read_text() == "GB"
    assert 'const units = "GB";' in (tmp_path / "p.html").read_text(encoding="utf-8")


def test_parameters_are_those_of_the_traced_model(model, tmp_path):
    given = ["--context-length", "64", "--attention", "nsa", "--dtype", "float32", "--json", str(tmp_path / "p.json")]
    assert main(["profile", "--model", model, *given]) == 0
    found = json.loads((tmp_path / "p.json").read_text())
    assert 4 * found["parameters"] == pytest.approx(found["runs"]["dense"]["stages"][0]["bytes"], rel=0.01)


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_a_device_that_is_not_there_is_refused_before_a_step_is_traced(model, capsys, monkeypatch):
    monkeypatch.setattr("logitless.workbench.profile.step.traced", None)
    assert main(["profile", "--model", model, "--real", "cuda"]) == 2
    assert "--real cuda: this torch sees no CUDA device; use --real cpu" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--model qwen3-5b", "unknown model 'qwen3-5b': did you mean qwen3-8b"),
        ("--context-length 0", "--context-length must be 2 to 2^63-1, got 0"),
        ("--context-length -5", "--context-length must be 2 to 2^63-1, got -5"),
        ("--context-length 99999999999999999999", "--context-length must be 2 to 2^63-1"),
        ("--batch-size 4000000000000000000", "more than 2^63-1 bytes"),
        ("--offload-activations", "--offload-activations needs --gradient-checkpointing"),
        ("--savings luck", "--savings must be all or some of"),
        ("--optimizer lion", "'--optimizer'. Expected one of ('adamw', 'sgd', 'none')"),
        ("--dtype int8", "'--dtype'. Expected one of ('bfloat16'"),
        ("--attention flash", "'--attention'. Expected one of ('auto', 'sdpa'"),
        ("--memory-budget lots", "--memory-budget must be a size such as 256MiB"),
        ("--model gemma-2-2b --attention sdpa", "model gemma-2-2b: cannot be"),
        ("--model no-such.json", "there is no such file"),
        ("--loss sparse", "--loss"),
    ],
)
def test_bad_input_is_one_line(arguments, message, capsys):
    assert main(["profile", *arguments.split()]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.startswith("logitless: ")
    assert error.count("\n") == 1


def test_a_model_that_will_not_trace_is_one_line(model, capfd):
    assert main(["profile", "--model", model, "--context-length", str(2**48)]) == 2
    error = capfd.readouterr().err  # of the process: what torch logs as well
    assert error.startswith(f"logitless: model {model}: cannot be traced: ")
    assert error.count("\n") == 1


def test_a_missing_key_is_named(model, tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in SMALL.items() if k != "hidden_size"}))
    assert main(["profile", "--model", model]) == 2
    assert "has no hidden_size; add it" in capsys.readouterr().err
