"""The GPU benchmark from end to end on toy shapes: under Triton's interpreter where there is no GPU."""

import json
import os
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from bench import gpu
from bench.gpu_rows import ROWS, errors_of, make_operands, oracle
from bench.harness import read_lines
from logitless.vocab.backends import triton_tuned

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """`bench/gpu.sh` on toy shapes, which must end well."""
    environment = os.environ | ({} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"})
    command = ["bash", str(ROOT / "bench/gpu.sh"), *arguments, "--tiny"]
    environment |= {"PYTHON": sys.executable}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr + done.stdout
    return done


@pytest.mark.parametrize(
    "rows",
    [
        pytest.param(("loss", "sample"), id="two rows"),
        pytest.param(
            ("loss-qwen", "values", "values-qwen", "frozen", "ppo", "long"), id="rest", marks=pytest.mark.slow
        ),
    ],
)
def test_a_dry_run(rows, tmp_path):
    out = tmp_path / "gpu.jsonl"
    same = ("table", "--rounds", "1", "--methods", "logitless,Liger")
    done = run(*same, "--rows", ",".join(rows), "--out", str(out))
    about, *records = read_lines(out)
    assert about["versions"]["torch"] == torch.__version__
    ours = {r["case"]: r for r in records if r["method"] == "logitless"}
    assert set(ours) == set(rows)
    for record in ours.values():
        assert record["status"] == "ok", record
        assert record["to_bare"] > 0
        assert max(record.get("errors", {"": 0.0}).values()) < 1e-5  # fp32 on a CPU
    if find_spec("liger_kernel") is None:
        absent = {r["reason"] for r in records if r["method"] == "Liger"}
        assert absent <= {"ModuleNotFoundError: No module named 'liger_kernel'"}
    assert done.stdout.count("| **") == len(rows)
    assert out.with_suffix(".png").exists() or "no plot: matplotlib is not installed" in done.stdout


def test_what_there_is_no_time_for_is_named(tmp_path):
    out = tmp_path / "gpu.jsonl"
    done = run("--seconds", "0.1", "--rows", "values", "--out", str(out))
    about, check, *records = read_lines(out)
    assert about["kind"] == "environment"
    assert check["kind"] == "gpu-check"
    assert len(check["passed"]) == 1  # each process begins one
    assert len(check["left"]) > 50
    assert {(r["status"], r["reason"]) for r in records} == {("failed", "no time left")}
    assert "| failed: no time left |" in done.stdout


def test_a_check_that_hangs_is_killed():
    """Not only this process ends: those that it has started would keep the GPU."""
    quick, *hanging = [
        subprocess.Popen([sys.executable, "-c", code]) for code in ("", *["import time; time.sleep(60)"] * 2)
    ]
    quick.wait()
    assert gpu._ended([hanging[0], quick, hanging[1]], time.monotonic() + 0.1) == [-9, 0, -9]


@pytest.mark.slow
def test_extras_say_what_they_found_or_why_not(tmp_path):
    out = tmp_path / "extras.jsonl"
    run("extras", "--parts", "logps,profiles", "--out", str(out))
    _, *records = read_lines(out)
    assert {r["status"] for r in records} == {"ok"}
    assert records[-1]["result"]["measured"]["device"] == "cpu"
    run("extras", "--parts", "profiles", "--seconds", "1", "--out", str(tmp_path / "late.jsonl"))
    assert read_lines(tmp_path / "late.jsonl")[-1]["reason"] == "no time left"


@pytest.mark.slow
def test_tuning_writes_sizes(tmp_path):
    out = tmp_path / "sizes.json"
    run("tune", "--out", str(out))
    sizes = json.loads(out.read_text("utf-8"))
    assert sizes["fold"]["block"] in (256, 512)
    assert set(sizes) == set(triton_tuned.table("default"))


def test_sizes_are_those_of_the_gpu(tmp_path, monkeypatch):
    (tmp_path / "tuned").mkdir()
    for name in ("default", "nvidia-h200"):
        (tmp_path / "tuned" / f"{name}.json").write_text(json.dumps({"about": name}))
    monkeypatch.setattr(triton_tuned, "files", lambda _: tmp_path)
    triton_tuned.table.cache_clear()
    assert triton_tuned.table("NVIDIA H200")["about"] == "nvidia-h200"
    assert triton_tuned.table("NVIDIA B200")["about"] == "default"
    triton_tuned.table.cache_clear()


def test_the_correctness_suite_needs_no_pytest():
    code = "import sys, tests.vocab.triton_cases; sys.exit('pytest' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, cwd=ROOT).returncode == 0


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("--rows", "los"), "unknown row 'los'"),
        (("--out", __file__), "exists already"),
        (("--out", "nowhere.jsonl", "check"), "torch sees no GPU"),
        (("--out", "nowhere.jsonl", "extras", "--tiny", "--parts", "logs"), "unknown part 'logs'"),
    ],
)
def test_bad_input(arguments, line, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as stop:
        gpu.main(list(arguments))
    assert stop.value.code == 2
    assert line in capsys.readouterr().err


def test_a_result_that_is_wrong_is_seen():
    row = ROWS["values"]
    tensors = make_operands(row, row.tiny, "cpu", torch.float32)
    expected = oracle(row, tensors)
    right = {name: x.float() for name, x in expected.items()}
    assert max(errors_of(expected, right).values()) < 1e-5
    assert errors_of(expected, right | {"entropy": right["entropy"] + 0.5})["entropy"] > 0.4
    assert errors_of(expected, {"logprob": right["logprob"]})["entropy"] == float("inf")
    assert errors_of(expected, right | {"logprob": right["logprob"] * float("nan")})["logprob"] == float("inf")
