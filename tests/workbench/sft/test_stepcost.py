"""The measurement of one step where memory ends: it says what did not fit, in words for a table."""

import json
import re
from dataclasses import replace
from subprocess import CompletedProcess

import pytest
import torch

from logitless.models.catalog import from_config
from logitless.units import format_bytes
from logitless.workbench.sft.data import prepare
from logitless.workbench.sft.stepcost import measure, measure_here
from logitless.workbench.sources.model import load_tokenizer, resolve
from tests.support.workbench.micro import micro_directory, micro_model

GPU = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 37.00 GiB.\nGPU 0 has a total\nof which\nis free")
CPU = RuntimeError("[enforce fail at alloc_cpu.cpp:1] DefaultCPUAllocator: can't allocate memory: you tried")


@pytest.fixture
def tokens(micro, tmp_path):
    source = resolve(micro.config.model)
    prepare(micro.config, load_tokenizer(source), source.vocab_size, tmp_path / "tokens.npz")
    return tmp_path / "tokens.npz"


@pytest.mark.parametrize("error", [GPU, CPU, MemoryError()])
@pytest.mark.parametrize("where", ["sft.stepcost._step", "sources.model.build"])
def test_what_does_not_fit_is_said_in_words(error, where, micro, tokens, monkeypatch):
    def fail(*_):
        raise error

    monkeypatch.setattr(f"logitless.workbench.{where}", fail)
    found = dict(measure_here(micro.config, tokens))
    assert set(found) == {"logitless", "dense"}
    for result in found.values():
        assert result["not_measured"].startswith("does not fit: ")
        assert result["not_measured"].endswith("that are free")
        assert re.search(r"(the model|a step) of [1-9][\d.]* [KMG]iB or more into the ", result["not_measured"])
        assert "llocat" not in result["not_measured"]
        assert len(result["not_measured"]) < 90


def test_a_defect_of_a_step_is_not_called_memory(micro, tokens, monkeypatch):
    def fail(*_):
        raise RuntimeError("a defect")

    monkeypatch.setattr("logitless.workbench.sft.stepcost._step", fail)
    with pytest.raises(RuntimeError, match="a defect"):
        dict(measure_here(micro.config, tokens))


def test_a_step_that_cannot_fit_is_not_begun(micro, tokens, monkeypatch):
    """The least that it takes: gradients, and of a dense loss three tensors of the logits in fp32."""
    monkeypatch.setattr("logitless.resident.free_bytes", lambda device: 1000)
    monkeypatch.setattr("logitless.workbench.sft.stepcost._step", lambda *_: pytest.fail("begun"))
    source = resolve(micro.config.model)
    gradients = 4 * from_config(source.config.to_dict(), "").parameters
    logits = 4 * micro.config.batch_size * micro.config.context_length * source.vocab_size
    for method, result in measure_here(micro.config, tokens):
        needed = gradients + (3 * logits if method == "dense" else 0)
        expected = f"does not fit: a step of {format_bytes(needed)} or more into the 1000 B that are free"
        assert result == {"not_measured": expected}


@pytest.mark.parametrize(("dtype", "size"), [("bfloat16", 2), ("float32", 4)])
def test_a_model_that_cannot_fit_takes_its_weights(micro, tokens, monkeypatch, dtype, size):
    def fail(*_):
        raise MemoryError

    monkeypatch.setattr("logitless.workbench.sources.model.build", fail)
    weights = size * from_config(resolve(micro.config.model).config.to_dict(), "").parameters
    for _, result in measure_here(replace(micro.config, dtype=dtype), tokens):
        assert f"the model of {format_bytes(weights)} or more" in result["not_measured"]


@pytest.mark.parametrize(
    ("status", "said", "why"),
    [
        (-9, "a\nb", "killed, most likely for memory"),
        (1, "a\nb\n", "b"),
        (1, "", "the measuring process said nothing"),
    ],
)
def test_a_process_that_ends_early_keeps_what_it_measured(micro, tokens, monkeypatch, status, said, why):
    found = {"peak_bytes": 1, "seconds": 2.0, "loss": 3.0, "curve": []}
    line = json.dumps({"method": "logitless", **found})
    done = CompletedProcess([], status, f"noise\n{line}\n", said)
    monkeypatch.setattr("logitless.workbench.sft.stepcost.subprocess.run", lambda *_, **__: done)
    assert measure(micro.config, tokens) == {"logitless": found, "dense": {"not_measured": why}}


def test_a_step_is_measured_in_training(micro, tokens, monkeypatch, tmp_path):
    """A model with weights is loaded for evaluation, in which nothing is checkpointed."""
    micro_model().save_pretrained(tmp_path / "model")
    micro_directory(tmp_path / "model")
    seen = []

    def step(model, *_):
        seen.append(model.training)
        return 1.0

    monkeypatch.setattr("logitless.workbench.sft.stepcost._step", step)
    for _, result in measure_here(replace(micro.config, model=str(tmp_path / "model")), tokens):
        assert result["loss"] == 1.0
    assert seen == [True] * 4  # a first call and the one that is measured, of each method
