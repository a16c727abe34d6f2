"""Fixtures for every test: a fixed seed, poisoned uninitialised memory, the backends that run here."""

import random

import hypothesis
import numpy
import pytest
import torch
from torch._dynamo import trace_rules
from torch.utils._device import _device_constructors

# torch.compile and `with torch.device(...)` learn once which object is torch.empty: let them see the real one.
trace_rules.get_torch_obj_rule_map()
_device_constructors()

# The same examples on every run, however busy the machine.
hypothesis.settings.register_profile("logitless", deadline=None, derandomize=True)
hypothesis.settings.load_profile("logitless")


def _poisoned(create):
    """Fill what `create` leaves uninitialised with values that no result can hide."""

    def poisoned(*args, **kwargs):
        out = create(*args, **kwargs)
        if out.is_floating_point() or out.is_complex():
            return out.detach().fill_(float("nan")).requires_grad_(out.requires_grad)
        return out if out.dtype == torch.bool else out.fill_(torch.iinfo(out.dtype).max // 2)

    return poisoned


@pytest.fixture(autouse=True)
def nan_poisoned_empty(request, monkeypatch):
    if request.node.get_closest_marker("compiled"):
        return  # torch.compile recognises torch.empty by identity, so it cannot trace the poisoned one
    for owner, name in (
        (torch, "empty"),
        (torch, "empty_like"),
        (torch, "empty_strided"),
        (torch.Tensor, "new_empty"),
        (torch.Tensor, "new_empty_strided"),
    ):
        monkeypatch.setattr(owner, name, _poisoned(getattr(owner, name)))


@pytest.fixture(autouse=True)
def seed() -> int:
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)
    return 0


@pytest.fixture(params=["eager"])
def backend(request) -> str:
    return request.param
