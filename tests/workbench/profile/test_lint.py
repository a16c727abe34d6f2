"""Device lint: a tensor made on the host, where the model's device was meant."""

from pathlib import Path

import pytest
import torch
from torch import nn

from logitless.memory import trace

pytestmark = pytest.mark.compiled  # fake tensors hold nothing to poison
HERE = Path(__file__)


class Rotary(nn.Module):
    """Rotary tables for a number of positions, grown when a longer context comes."""

    def __init__(self, width: int = 16, positions: int = 32) -> None:
        super().__init__()
        inverse = 10_000.0 ** -(torch.arange(0, width, 2, dtype=torch.float32) / width)
        self.register_buffer("inverse", inverse)
        self.grow(positions)

    def positions(self, length: int) -> torch.Tensor:
        return torch.arange(length, dtype=self.inverse.dtype, device=self.inverse.device)

    def grow(self, length: int) -> None:
        angles = torch.outer(self.positions(length), self.inverse)  # where it fails
        self.register_buffer("cosine", angles.cos(), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[1] > self.cosine.shape[0]:
            self.grow(x.shape[1])
        return x * self.cosine[: x.shape[1]]


class BuggyRotary(Rotary):
    def positions(self, length: int) -> torch.Tensor:
        return torch.arange(length, dtype=self.inverse.dtype)  # the device is missing


class Model(nn.Module):
    def __init__(self, rotary: type[Rotary]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))
        self.rotary = rotary()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.rotary(x) * self.weight


def line_of(text: str) -> int:
    return next(i for i, line in enumerate(HERE.read_text().splitlines(), 1) if text in line)


def lint(rotary: type[Rotary], length: int, device: str = "gpu"):
    with torch.device("meta"):
        model = Model(rotary)
    with trace(model, device=device) as t:
        model(torch.zeros(2, length, 8, device=t.device)).sum().backward()
    return t


def test_the_fixed_class_is_clean_within_and_beyond_its_table():
    assert lint(Rotary, 16).findings == lint(Rotary, 64).findings == ()


def test_the_bug_shows_when_the_context_outgrows_the_table():
    assert lint(BuggyRotary, 16).findings == ()
    (found,) = lint(BuggyRotary, 64).findings
    assert (found.used.file, found.used.line) == (str(HERE), line_of("# where it fails"))
    assert found.made is not None
    assert (found.made.file, found.made.line) == (str(HERE), line_of("# the device is missing"))
    assert (found.op, found.device) == ("mul", "cpu")
    assert "torch.arange(length" in str(found)
    assert "give device= there" in str(found)


def test_the_trace_goes_on_and_says_so_in_its_json():
    t = lint(BuggyRotary, 64)
    assert t.recording.stages[-1].name == "backward"
    (found,) = t.as_json()["lint"]
    assert found["line"] == line_of("# where it fails")
    assert found["made_code"].startswith("return torch.arange")
    assert f"{HERE}:{found['made_line']}" in t.table()


def test_a_chain_is_traced_to_its_first_line():
    class Chain(nn.Module):
        def __init__(self, rotary) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(8))

        def forward(self, x):
            start = torch.arange(8, dtype=torch.float32)  # the chain's first line
            return x * (start * 2).square() * self.weight

    with torch.device("meta"):
        model = Chain(None)
    with trace(model) as t:
        model(torch.zeros(8, device=t.device))
    (found,) = t.findings
    assert found.made is not None
    assert found.made.line == line_of("# the chain's first line")


def test_hosts_may_hold_scalars_indices_and_copies():
    class Fine(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(8))

        def forward(self, x):
            scale = torch.tensor(0.5)
            return x[torch.arange(4)] * scale * torch.ones(8).to(x.device) * self.weight

    with torch.device("meta"):
        model = Fine()
    with trace(model) as t:
        model(torch.zeros(8, 8, device=t.device))
    assert t.findings == ()


def test_a_cpu_has_one_device():
    assert lint(BuggyRotary, 64, device="cpu").findings == ()
