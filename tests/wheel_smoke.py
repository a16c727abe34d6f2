"""Run by `make wheel-test` against the built wheel, out of reach of the source tree."""

import subprocess
import sys
from importlib.metadata import files
from pathlib import Path

import torch

import logitless


def test_the_wheel_is_what_is_imported():
    assert Path(logitless.__file__).is_relative_to(sys.prefix)


def test_every_public_name_is_there():
    for name in logitless.__all__:
        assert getattr(logitless, name) is not None


def test_it_is_typed_and_licensed():
    packaged = {path.name for path in files("logitless") or []}
    assert {"py.typed", "LICENSE", "stream.cpp", "vectors.h"} <= packaged


def test_loss_and_gradient_agree_with_dense():
    hidden = torch.randn(5, 8, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(37, 8, dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([0, 36, -100, 7, 7])
    ours = logitless.linear_cross_entropy(hidden, logitless.LMHead(weight), labels)
    dense = torch.nn.functional.cross_entropy(hidden @ weight.T, labels)
    torch.testing.assert_close(ours, dense)
    for a, b in zip(
        torch.autograd.grad(ours, (hidden, weight)), torch.autograd.grad(dense, (hidden, weight)), strict=True
    ):
        torch.testing.assert_close(a, b)


def test_the_command_line_starts():
    started = subprocess.run(
        [Path(sys.prefix) / "bin" / "logitless", "--help"], capture_output=True, text=True, timeout=120
    )
    assert started.returncode == 0, started.stderr
    assert "train" in started.stdout
