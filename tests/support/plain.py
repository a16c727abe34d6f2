"""What tests need to say of themselves that run under pytest, and without it where a GPU is: a machine of its own.

    @over("top_k", [3, 70], slow=["70"])
    def test_best_entries(top_k, device): ...

is what `pytest.mark.parametrize` and `pytest.mark.slow` say to pytest; a folder's conftest.py hands it on.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

Test = TypeVar("Test", bound=Callable[..., None])


class Case(NamedTuple):
    """A test with its arguments; the label is what pytest writes between brackets."""

    label: str = ""
    arguments: Mapping[str, Any] = {}
    slow: bool = False
    square: int = 0  # even or odd, as a chessboard's are white or black


def cases_of(test: Callable[..., None]) -> list[Case]:
    return getattr(test, "cases", [Case()])


def over(name: str, values: Mapping[str, Any] | Iterable[Any], slow: Collection[str] = ()) -> Callable[[Test], Test]:
    """The test once for each value of this argument, labelled by the mapping's key or by the value itself."""
    labelled = values if isinstance(values, Mapping) else {str(x): x for x in values}

    def put(test: Test) -> Test:
        test.cases = [
            Case(
                "-".join(filter(None, (case.label, label))),
                {**case.arguments, name: x},
                case.slow or label in slow,
                case.square + i,
            )
            for case in cases_of(test)
            for i, (label, x) in enumerate(labelled.items())
        ]
        return test

    return put


def slow(test: Test) -> Test:
    """`make test-all` runs it, `make test` does not."""
    test.cases = [case._replace(slow=True) for case in cases_of(test)]
    return test


def halved(test: Test) -> Test:
    """Every other case is slow, so that each value and most pairs of values stay fast."""
    test.cases = [case._replace(slow=case.slow or case.square % 2 == 1) for case in cases_of(test)]
    return test


def refusal(error: type[Exception], step: Callable[[], object]) -> str:
    """What the step says when it raises this error."""
    try:
        step()
    except error as reason:
        return str(reason)
    raise AssertionError(f"no {error.__name__} was raised")
