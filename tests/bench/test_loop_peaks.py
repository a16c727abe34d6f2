"""The copied loops over logits: counted on fake tensors, and the same counted on real ones."""

import pytest
import torch

from bench.harness import read_lines
from bench.logits.peaks import METHODS, main, peak_bytes
from tests.support.allocations import peak_new_bytes

SHAPE = (8, 64, 2048)
TRAINING = {"batch": 4.0, "loop": 3.0, "chunk_size=2": 4.5}  # times the logits


@pytest.mark.parametrize("method", list(METHODS))
def test_peaks_on_fake_tensors_are_those_of_real_ones(method):
    counted = peak_bytes(METHODS[method], SHAPE, torch.float32, train=True)
    logits = torch.randn(SHAPE, requires_grad=True)
    ids = torch.randint(SHAPE[2], SHAPE[:2])
    real = logits.nbytes + peak_new_bytes(lambda: METHODS[method](logits, ids).sum().backward())
    assert counted == pytest.approx(real, rel=0.01)
    assert counted / logits.nbytes == pytest.approx(TRAINING[method], rel=0.02)


def test_the_script_writes_a_line_for_each_method(tmp_path, capsys):
    out = tmp_path / "peaks.jsonl"
    assert main(["--shape", "4,6,500", "--out", str(out)]) == 0
    environment, *records = read_lines(out)
    assert environment["kind"] == "environment"
    assert [r["method"] for r in records[:-1]] == list(METHODS) * 2
    assert "fp32" in capsys.readouterr().out
