"""Operands of a small call, and holding an error to its type, its one line and what it says."""

import re

import pytest
import torch
from torch import Tensor

import logitless as ll
from logitless.errors import (
    BackendError,
    ConfigError,
    DeviceError,
    DtypeError,
    GradientError,
    LabelError,
    LogitlessError,
    NotFiniteError,
    OptionError,
    ShapeError,
)

N, H, V = 6, 4, 9
HIDDEN, WEIGHT, BIAS = torch.randn(2, 3, H), torch.randn(V, H), torch.randn(V)
LABELS = torch.arange(N).view(2, 3)
REF = (torch.randn(2, 3, 5), ll.LMHead(torch.randn(V, 5)))
NAN = float("nan")
BUILTINS = {
    ShapeError: ValueError,
    DtypeError: TypeError,
    DeviceError: ValueError,
    LabelError: ValueError,
    OptionError: ValueError,
    ConfigError: ValueError,
    BackendError: RuntimeError,
    GradientError: RuntimeError,
    NotFiniteError: ArithmeticError,
}


def ids(*values: int) -> Tensor:
    """Labels of the call's shape with these first."""
    out = LABELS.clone()
    out.view(-1)[: len(values)] = torch.tensor(values)
    return out


def refused(error: type[LogitlessError], call, *fragments: str) -> None:
    """`call` raises exactly this error, on one line, with the fragments in order."""
    with pytest.raises(error) as caught:
        call()
    message = str(caught.value)
    assert type(caught.value) is error
    assert issubclass(error, BUILTINS[error])
    assert "\n" not in message
    assert re.search(".*".join(map(re.escape, fragments)), message), message


def everywhere(hidden=HIDDEN, head=None, labels: Tensor | None = LABELS, **options):
    """Each public function that takes these arguments, as a call without any."""
    args = (hidden, head if head is not None else ll.LMHead(WEIGHT), labels)
    return {
        "token_stats": lambda: ll.token_stats(*args, **options),
        "token_loss": lambda: ll.token_loss(lambda s: s.logprob, *args, **options),
        "token_loss none": lambda: ll.token_loss(lambda s: s.logprob, *args, reduction="none", **options),
        "explain": lambda: ll.explain(*args, **options),
    }


def refused_everywhere(error, fragments, **arguments):
    for call in everywhere(**arguments).values():
        refused(error, call, *fragments)
