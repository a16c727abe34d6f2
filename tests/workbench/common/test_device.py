"""Where a command computes, and the bytes of slices that it takes there unless told."""

from types import SimpleNamespace

import pytest
import torch

from logitless.algebra.costs import DEFAULT_BUDGET, GPU_BUDGET
from logitless.errors import DeviceError
from logitless.workbench.common.device import device_of
from logitless.workbench.scoring.config import ScoreConfig
from logitless.workbench.sft.config import TrainConfig


@pytest.fixture
def gpus(monkeypatch):
    """Two of them, each with this many GiB."""
    memory = SimpleNamespace(total_memory=80 << 30)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: memory)
    return memory


def test_a_gpu_where_there_is_one(gpus):
    assert device_of("cpu") == torch.device("cpu")
    assert [device_of(asked, 3) for asked in ("auto", "cuda")] == [torch.device("cuda", 1)] * 2


def test_a_gpu_that_is_not_there(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device_of("auto") == torch.device("cpu")
    with pytest.raises(DeviceError, match="--device cuda: this torch sees no GPU; use --device cpu"):
        device_of("cuda")


@pytest.mark.parametrize("kind", [TrainConfig, ScoreConfig])
def test_slices_are_as_large_as_the_device_is(kind, gpus):
    assert kind(device="cpu").memory_budget_bytes == DEFAULT_BUDGET
    assert kind().memory_budget_bytes == GPU_BUDGET
    gpus.total_memory = 24 << 30
    assert kind().memory_budget_bytes == 384 << 20
    assert kind(memory_budget="64MiB").memory_budget_bytes == 64 << 20
    assert TrainConfig().loss_threshold_bytes == 384 << 20
