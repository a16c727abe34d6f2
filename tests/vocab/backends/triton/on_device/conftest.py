"""The tests of this folder run under pytest, and without it on a machine that has a GPU and nothing else.

They import no pytest: `tests.support.plain` says what their parameters are, and here pytest is told.
`python -m tests.support.vocab.triton_run` runs them without it.
"""

from importlib.util import find_spec

import pytest
import torch

from tests.support.plain import cases_of

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def device() -> str:
    if find_spec("triton") is None:
        pytest.skip("triton is not installed")
    if DEVICE == "cpu":
        from tests.support.vocab.interpreter import hasten

        hasten()
    return DEVICE


def pytest_generate_tests(metafunc):
    cases = cases_of(metafunc.function)
    if names := list(cases[0].arguments):
        marks = {True: [pytest.mark.slow], False: []}
        rows = [pytest.param(*case.arguments.values(), id=case.label, marks=marks[case.slow]) for case in cases]
        metafunc.parametrize(names, rows)


def pytest_itemcollected(item):
    item.add_marker(pytest.mark.filterwarnings("ignore::RuntimeWarning"))  # numpy's, of -inf - -inf and the like
    if all(case.slow for case in cases_of(item.function)):
        item.add_marker(pytest.mark.slow)
