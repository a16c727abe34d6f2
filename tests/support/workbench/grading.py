"""Options of a run of alignment through soft tokens, beside the fixture `small`."""

import dataclasses
from types import SimpleNamespace

from logitless.workbench.grade.config import GradeConfig


def of(small: SimpleNamespace, name: str, **changes: object) -> GradeConfig:
    """The fixture's run in a directory of its own."""
    return dataclasses.replace(small.config, output_dir=small.root / name, **changes)
