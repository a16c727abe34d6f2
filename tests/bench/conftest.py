"""Workers of the benchmarks, forked instead of begun anew; the dry run of bench/gpu.sh has them as users have."""

import pytest

from bench import harness
from tests.support.forked import FORKED


@pytest.fixture(autouse=True, scope="session")
def forked_workers():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(harness, "START", FORKED.get_start_method())
        yield
