"""The training tests' micro model and corpus."""

from tests.workbench.conftest import micro

__all__ = ["micro"]
