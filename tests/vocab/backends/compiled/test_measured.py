"""Which of the two products is faster on this machine: measured once, and read by calls on an Intel processor."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import logitless as ll
from logitless.vocab.backends import logits
from logitless.vocab.backends.compiled import measured, stream
from tests.support.vocab.processors import needs_library

pytestmark = needs_library


@pytest.fixture
def place(tmp_path, monkeypatch):
    """Where a library lies that nobody has measured."""
    monkeypatch.setattr(measured, "library", lambda: SimpleNamespace(place=tmp_path / "one.so"))
    yield tmp_path / "one.so"
    measured._ratio.cache_clear()


def asked_again(monkeypatch, ratio: float) -> bool:
    """As another process asks, in which a measurement would give `ratio`."""
    measured._ratio.cache_clear()
    monkeypatch.setattr(measured, "_measure", lambda: ratio)
    return measured.is_faster(kept=False)


def test_it_is_measured_once(place, monkeypatch):
    assert asked_again(monkeypatch, 0.8)
    assert asked_again(monkeypatch, 1.2)
    assert Path(place).with_suffix(".ratio").read_text() == "0.800"
    Path(place).with_suffix(".ratio").write_text("no number")
    assert not asked_again(monkeypatch, 1.2)
    assert [x.name for x in Path(place).parent.iterdir()] == ["one.ratio"]


def test_where_nothing_can_be_kept_each_process_measures(place, monkeypatch):
    monkeypatch.setattr(measured, "library", lambda: SimpleNamespace(place=Path(place).parent / "none" / "one.so"))
    assert asked_again(monkeypatch, 0.8)
    assert not asked_again(monkeypatch, 1.2)


@pytest.mark.parametrize(
    ("intel", "ratio", "taken"),
    [(True, 0.8, (True, True)), (True, 0.9, (True, False)), (True, 1.1, (False, False)), (False, 1.1, (True, True))],
)
def test_an_intel_processor_takes_what_is_faster(intel, ratio, taken, place, monkeypatch):
    """Values, whose alternative reads each slice again, sooner than a loss, whose other products are bare."""
    monkeypatch.setattr(stream, "is_intel", lambda: intel)
    monkeypatch.setattr(logits, "has_bf16_tiles", lambda x: False)
    monkeypatch.setattr(measured, "_measure", lambda: ratio)
    hidden, labels = torch.randn(40, 8), torch.randint(1031, (40,))
    head = ll.LMHead(torch.randn(1031, 8).requires_grad_())
    values = ll.explain(hidden, ll.LMHead(head.weight.detach()), labels, backend="compiled")
    loss = ll.explain(hidden, head, labels, want=("logprob", "entropy"), loss=True, backend="compiled")
    assert (values.slices.in_products, loss.slices.in_products) == taken


def test_a_measurement_is_a_ratio_of_two_times():
    before = torch.random.get_rng_state()
    with torch.inference_mode():
        ratio = measured._measure()
    assert 0.05 < ratio < 20
    assert torch.equal(torch.random.get_rng_state(), before)
