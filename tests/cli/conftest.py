"""The training tests' micro model and corpus."""

from tests.train.conftest import micro, unmeasured

__all__ = ["micro", "unmeasured"]
