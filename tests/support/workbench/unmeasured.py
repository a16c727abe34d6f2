"""Runs of `logitless train` without the measurement of a step's memory, which is a process of its own."""

import pytest

from logitless.workbench.sft import run


def leave_unmeasured(patch: pytest.MonkeyPatch) -> None:
    """Until the patch is undone nothing is measured: most tests are about something else."""
    nothing = {method: {"not_measured": "test"} for method in run.METHODS}
    patch.setattr(run, "measure", lambda config, tokens: nothing)
