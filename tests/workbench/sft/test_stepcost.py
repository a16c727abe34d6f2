"""The measurement of one step where memory ends: it says what did not fit, in words for a table."""

import re

import pytest
import torch

from logitless.workbench.sft.data import prepare
from logitless.workbench.sft.stepcost import measure_here
from logitless.workbench.sources.model import load_tokenizer, resolve

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
