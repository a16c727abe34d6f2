"""Fixtures for every test: a fixed seed, poisoned uninitialised memory, the backends that run here."""

import random

import hypothesis
import numpy
import pytest
import torch
from torch._dynamo import trace_rules
from torch.utils._device import _device_constructors

from tests.support.allocations import poison

# torch.compile and `with torch.device(...)` learn once which object is torch.empty: let them see the real one.
trace_rules.get_torch_obj_rule_map()
_device_constructors()

# The same examples on every run, however busy the machine.
hypothesis.settings.register_profile("logitless", deadline=None, derandomize=True)
hypothesis.settings.load_profile("logitless")


@pytest.fixture(autouse=True)
def nan_poisoned_empty(request, monkeypatch):
    if request.node.get_closest_marker("compiled"):
        # torch.compile recognises torch.empty by identity, so it cannot trace the poisoned one, nor the real one where
        # it learnt the poisoned one: a process group makes it learn anew.
        if torch.empty not in trace_rules.get_torch_obj_rule_map():
            trace_rules.clear_lru_cache()
        return
    poison(monkeypatch.setattr)


@pytest.fixture(autouse=True)
def seed() -> int:
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)
    return 0


@pytest.fixture(params=["eager"])
def backend(request) -> str:
    return request.param
