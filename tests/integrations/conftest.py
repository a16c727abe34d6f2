"""The training tests' micro model and corpus."""

from tests.train.conftest import micro

__all__ = ["micro"]
