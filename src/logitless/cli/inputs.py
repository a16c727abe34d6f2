"""What a command reads, looked at before anything is imported that takes seconds."""

from __future__ import annotations

from pathlib import Path

from ..errors import DataError
from ..workbench.runs.model import check_model
from ..workbench.runs.options import DEFAULT_MODEL, SMALL_MODEL


def check_inputs(model: str, wish: str | None = None, data: str | None = None) -> None:
    """DataError, ConfigError for a path that is not there; `wish`: what the model's weights are for.

    The default models are trained where they are not there.
    """
    if data is not None and not Path(data).exists():
        raise DataError(f"--data {data}: no such file or directory")
    if model not in (DEFAULT_MODEL, SMALL_MODEL) or Path(model).exists():
        check_model(model, wish)
