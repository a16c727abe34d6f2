"""SmolLM2 for tests: skipped with the reason where its package is not installed, converted once into build/."""

from pathlib import Path

import pytest

from logitless.errors import ConfigError
from logitless.models.pretrained import check_installed
from logitless.workbench.sources.converted import directory_of

CACHE = Path(__file__).parents[3] / "build" / "cache"


def real_model(name: str) -> str:
    """The model's name, its files ready; XDG_CACHE_HOME stays as it is for the rest of the test session."""
    try:
        check_installed(name)
    except ConfigError as error:
        pytest.skip(str(error))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(CACHE))
        directory_of(name)
    return name
