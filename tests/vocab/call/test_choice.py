"""Which backend a call gets: the best that can run here, and a reason where a named one cannot."""

import pytest
import torch

import logitless as ll
from logitless.errors import BackendError
from logitless.vocab.backends.load import LOADERS, load
from logitless.vocab.call import choice, triton_support


def on_a_gpu(monkeypatch, capability=(9, 0)):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)


def test_a_gpu_gets_triton(monkeypatch):
    on_a_gpu(monkeypatch)
    assert choice.choose(None, "cuda") == "triton"
    assert choice.choose("eager", "cuda") == "eager"


@pytest.mark.parametrize("device", ["cpu", "mps", "meta"])
def test_elsewhere_eager(device):
    assert choice.choose(None, device) == "eager"


def test_without_triton_a_gpu_gets_eager(monkeypatch):
    on_a_gpu(monkeypatch)
    monkeypatch.setattr(triton_support, "find_spec", lambda _: None)
    assert choice.choose(None, "cuda") == "eager"
    with pytest.raises(BackendError, match="triton is not installed"):
        choice.choose("triton", "cuda")


def test_an_old_gpu_gets_eager(monkeypatch):
    on_a_gpu(monkeypatch, (7, 5))
    assert choice.choose(None, "cuda") == "eager"
    with pytest.raises(BackendError, match=r"8\.0 or more, got 7\.5"):
        choice.choose("triton", "cuda")


def test_a_gpu_of_rocm_gets_eager(monkeypatch):
    on_a_gpu(monkeypatch)
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert choice.choose(None, "cuda") == "eager"
    with pytest.raises(BackendError, match="needs an NVIDIA GPU, got one of ROCm"):
        choice.choose("triton", "cuda")


def test_the_tensors_own_gpu_is_asked(monkeypatch):
    on_a_gpu(monkeypatch)
    capabilities = {0: (7, 5), 1: (9, 0)}
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capabilities[device.index])
    assert choice.choose(None, torch.device("cuda", 0)) == "eager"
    assert choice.choose(None, torch.device("cuda", 1)) == "triton"


def test_no_gpu_that_torch_sees():
    if torch.cuda.is_available():
        pytest.skip("there is one")
    assert choice.choose(None, "cuda") == "eager"
    with pytest.raises(BackendError, match="torch sees no CUDA device"):
        choice.choose("triton", "cuda")


def test_by_name_on_a_cpu(monkeypatch):
    monkeypatch.setattr(triton_support, "interpreted", lambda: False)
    x = torch.randn(3, 4)
    with pytest.raises(BackendError, match="needs a CUDA device, got cpu; set TRITON_INTERPRET=1"):
        ll.token_stats(x, ll.LMHead(torch.randn(5, 4)), torch.tensor([0, 1, 2]), backend="triton")


def test_every_candidate_can_be_loaded_by_its_name():
    assert {name for name, candidate in choice.CANDIDATES.items() if candidate.only is None} == set(LOADERS)
    assert type(load("eager")).__name__ == "EagerBackend"
