"""The training tests' micro model and corpus."""

from tests.workbench.conftest import micro, unmeasured

__all__ = ["micro", "unmeasured"]
