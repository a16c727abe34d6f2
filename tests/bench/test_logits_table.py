"""The log-prob table's script, at a size that takes seconds."""

import pytest

from bench.harness import read_lines
from bench.logits.table import Subject, main, methods, write_logits

SHAPE = (4, 6, 50)


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("method", list(methods(SHAPE[0])))
def test_every_method_is_measured_and_right(tmp_path, dtype, method):
    write_logits(tmp_path / "logits", SHAPE, dtype)
    subject = Subject(tmp_path / "logits", SHAPE, dtype, method)
    value_error, grad_error = subject.error()
    own_dtype = dtype == "bf16" and method.startswith("tutorial")
    assert value_error < (0.1 if own_dtype else 5e-6)
    assert grad_error < (0.03 if dtype == "bf16" else 1e-6)
    assert len(subject.memory()) == 3
    assert min(subject.seconds()) > 0


@pytest.mark.slow
def test_the_script_writes_a_line_for_each_method(tmp_path, capsys):
    out = tmp_path / "table.jsonl"
    assert main(["--shape", "4,6,50", "--dtypes", "fp32", "--rounds", "1", "--out", str(out)]) == 0
    environment, *records = read_lines(out)
    assert environment["kind"] == "environment"
    assert environment["shape"] == list(SHAPE)
    assert [record["method"] for record in records] == list(methods(4))
    assert all(len(record["step_s"]) == 1 for record in records)
    assert "| fp32 | recompute |" in capsys.readouterr().out
