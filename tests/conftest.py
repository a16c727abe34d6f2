"""Fixtures for every test: a fixed seed, poisoned uninitialised memory, the backends that run here."""

import gc
import os
import random
from typing import Any

import hypothesis
import numpy
import pytest
import torch
from torch.utils._device import _device_constructors

from tests.support.allocations import poison
from tests.support.switches import switches

os.environ["HF_HUB_OFFLINE"] = "1"  # a model that is nowhere is refused at once, not after five tries
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before triton's first import, which is torch._dynamo's

from torch._dynamo import trace_rules

from logitless.vocab.call import compiled_support, triton_support

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


@pytest.fixture
def in_slices(monkeypatch):
    """No logits are added up in registers: products that no profiler of torch sees."""
    from logitless.vocab.backends.compiled import stream

    monkeypatch.setattr(stream, "takes", lambda *call, **how: False)


@pytest.fixture(autouse=True)
def switches_left_as_they_were():
    """Torch's switches of a whole process decide the last bits of every later test's numbers."""
    before = switches()
    yield
    assert switches() == before


@pytest.fixture(autouse=True)
def seed() -> int:
    random.seed(0)
    numpy.random.seed(0)
    if torch.cuda.is_available():
        torch.manual_seed(0)
    else:  # which queues the seed, and the stack, for each absent kind of device, at every call
        torch.default_generator.manual_seed(0)
    return 0


WHY_NOT = {"triton": triton_support.why_not, "compiled": compiled_support.why_not}


@pytest.fixture(
    params=[
        "eager",
        pytest.param("triton", marks=pytest.mark.filterwarnings("ignore::RuntimeWarning")),
        pytest.param("compiled", marks=[pytest.mark.slow, pytest.mark.compiled]),
    ]
)
def backend(request) -> str:
    """Every backend that runs on a CPU; Triton's kernels are interpreted, in numpy, which warns of inf - inf."""
    for mark in request.node.iter_markers("not_on"):
        if request.param in mark.args:
            pytest.skip(mark.kwargs["reason"])
    if request.param in WHY_NOT and (reason := WHY_NOT[request.param]("cpu")):
        pytest.skip(reason)
    if request.param == "triton":
        from tests.support.vocab.interpreter import hasten

        hasten()
    return request.param


def cases_on(backend: str, items: list[pytest.Item]) -> dict[str, list[pytest.Item]]:
    """The cases on this backend of the fixture, of each test."""
    found: dict[str, list[pytest.Item]] = {}
    for item in items:
        if getattr(item, "callspec", None) is not None and item.callspec.params.get("backend") == backend:
            found.setdefault(item.nodeid.partition("[")[0], []).append(item)
    return found


def black_squares(items: list[Any]) -> list[Any]:
    """Every other case of `halved` tests: the black ones, were `parametrize` marks the sides of a chessboard."""
    sides: dict[tuple[str, ...], dict[tuple[int, ...], int]] = {}
    found = []
    for item in items:
        if item.get_closest_marker("halved") is None:
            continue
        square = 0
        for mark in item.iter_markers("parametrize"):
            given = mark.args[0]
            names = [name.strip() for name in given.split(",")] if isinstance(given, str) else given
            side = sides.setdefault((item.nodeid.partition("[")[0], *names), {})  # pytest's own indices are the case's
            square += side.setdefault(tuple(id(item.callspec.params[name]) for name in names), len(side))
        if square % 2:
            found.append(item)
    return found


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """On Triton the fast suite runs the middle one of a test's parameters, and none of a test that is `slow_on` it.

    The compiled backend is the eager one but for its loops: it gets the middle one alone, in the slow suite. Of a test
    that is `halved` the fast suite runs every other case elsewhere.
    """
    for item in black_squares(items):
        if item.callspec.params.get("backend") != "triton":
            item.add_marker(pytest.mark.slow)
    for cases in cases_on("triton", items).values():
        for i, item in enumerate(cases):
            if i != len(cases) // 2 or any("triton" in mark.args for mark in item.iter_markers("slow_on")):
                item.add_marker(pytest.mark.slow)
    left_out = [
        item for cases in cases_on("compiled", items).values() for i, item in enumerate(cases) if i != len(cases) // 2
    ]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        gone = set(map(id, left_out))
        items[:] = [item for item in items if id(item) not in gone]


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """To search the million objects of imports and tests again and again, of which none goes, takes a third longer."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish():
    """What is imported by now stays to the end: the collector need not search it each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def nothing_is_searched_twice():
    """What a file leaves behind, such as compiled functions and caches, stays to the end too."""
    yield
    gc.collect()
    gc.freeze()


def pytest_sessionfinish():
    gc.unfreeze()  # so that Python ends as always
