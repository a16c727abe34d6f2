"""A backend's module by its name, imported on first use."""

from __future__ import annotations

import importlib
from types import ModuleType

BACKENDS = {"eager": "logitless.vocab.backends.eager.backend", "triton": "logitless.vocab.backends.triton.backend"}


ROWS = {"eager": "logitless.vocab.backends.rows", "triton": "logitless.vocab.backends.triton.rows"}


def load(name: str) -> ModuleType:
    """The backend's module, imported on first use."""
    return importlib.import_module(BACKENDS[name])


def rows_of(name: str) -> ModuleType:
    """The backend's products with a few rows of a table: `vocab.rows`, or what stands for it."""
    return importlib.import_module(ROWS[name])
