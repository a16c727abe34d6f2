"""Python as JavaScript: the same values, and a refusal for everything that the translator does not know."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property

import pytest

from logitless.errors import OptionError
from logitless.workbench.page.translate import translate
from tests.support.workbench.browser import NODE, run_node

needs_node = pytest.mark.skipif(NODE is None, reason="node is not installed")
TABLE = {"one": (1, 2), "two": (3, 4)}
FEW = frozenset({"a", "b"})


@dataclass(frozen=True)
class Pair:
    """A record with all that records may have."""

    first: int
    second: int = 2
    name: str = "pair"

    @property
    def total(self) -> int:
        return self.first + self.second

    @cached_property
    def double(self) -> int:
        return 2 * self.total

    def times(self, count: int, offset: int = 1) -> int:
        return self.total * count + offset


ROWS = {"x": Pair(1), "y": Pair(5, name="why")}


def arithmetic(a: int, b: int) -> list[int]:
    return [
        a + b,
        a - b,
        a * b,
        a // b,
        a % b,
        -a,
        a << 3,
        a >> 2,
        -(-a // b),
        abs(a),
        int(a > b) + int(True),
        a * True,
    ]


def comparisons(a: int, b: int) -> list[bool]:
    return [a < b, a <= b, a > b, a >= b, a == b, a != b, 0 < a <= b, a is None, a is not None, not a, (a > b) == 1]


def truths(a: int) -> list[object]:
    return [a or "zero", a and "more", bool(a), 1 if a else 2, 5 if "" else 6, bool(()), bool({0}), not [a], not None]


def collections(a: int) -> list[object]:
    pairs = [(i, i * a) for i in (1, 2, 3) if i != 2]
    table = {str(k): v for k, v in pairs}
    table2 = {"z": a, "y": 1}
    longer = (*pairs, (a, a))
    return [
        pairs,
        list(table.items()),
        list(table2.keys()),
        list(table2.values()),
        len(longer),
        longer[-1],
        longer[0:2],
        longer[1:],
        max(table2, key=lambda k: table2[k]),
        min(a, 3, 2),
        max([a, 7]),
        sum(x for _, x in pairs),
        any(x > 2 for x, _ in pairs),
        all(x > 2 for x, _ in pairs),
        "a" in FEW,
        "c" not in FEW,
        {"a"} <= FEW,
        set(FEW) == {"b", "a"},
        sorted(frozenset().union(FEW, {"c"})),
        next(x for x in (a, 9)),
        TABLE["two"][1],
        list(zip((1, 2, 3), "xy" and ("x", "y"), strict=False)),
        [y for x in ((1, 2), (a,)) for y in x],
        "b" in "abc",
        3 in (1, 2),
        (1, "a") == (1, "a"),
        (1, 2)[True],
    ]


def text(a: int) -> str:
    name = "é<×"
    ends = [name.endswith("×"), name.endswith("<")]
    return (
        f"{name}: {a:,} and {a % 100:02d}, {a > 3}, {', '.join(('a', 'b'))}{ends[0]}{ends[1]}"
        + name.replace("<", ">")
        + str(a)
    )


def evens(limit: int) -> Iterator[int]:
    for i in (0, 1, 2, 3, 4, 5):
        if i > limit:
            return
        if i % 2 == 0:
            yield i
    yield from (100, limit)


def inner(a: int) -> list[int]:
    step = 3

    def grow(x: int, *, by: int = 2) -> int:
        return x * by + step

    total = 0
    for left, right in ((1, a), (2, a)):
        total += grow(left) + grow(right, by=5)
    step = 100
    found: list[int] = []
    found.append(grow(1))
    return [total, *found, *evens(3)]


def records(a: int) -> list[object]:
    made = Pair(a, name="x")
    other = replace(made, second=a)
    biggest = max(ROWS.values(), key=lambda row: row.total)
    return [
        made.total,
        made.times(2),
        other.double,
        other.double,
        other.name,
        Pair(*TABLE["one"]).total,
        biggest.name,
        sum(getattr(made, n) for n in ("first", "second")),
        3 if made else 4,
    ]


def refuses(a: int) -> int:
    if a > 2:
        raise OptionError(f"--a must be at most 2, got {a}")
    return a


FUNCTIONS = (arithmetic, comparisons, truths, collections, text, evens, inner, records)
SHOW = """
const plain = (v) => typeof v === "bigint" ? { int: `${v}` } : Array.isArray(v) ? v.map(plain)
  : v !== null && typeof v === "object" && v[Symbol.iterator] ? [...v].map(plain) : v;
"""


def plain(value: object) -> object:
    if isinstance(value, int) and not isinstance(value, bool):
        return {"int": str(value)}
    if isinstance(value, list | tuple | Iterator):
        return [plain(v) for v in value]
    return value


@needs_node
def test_values_are_pythons():
    arguments = {
        arithmetic: [(7, 3), (-7, 3), (7, -3), (-6, -3), (2**70 + 1, 10**9)],
        comparisons: [(1, 2), (2, 2), (3, 2), (0, 5)],
    }
    script = translate({f.__name__: f for f in FUNCTIONS})
    calls, expected = [], []
    for function in FUNCTIONS:
        for given in arguments.get(function, [(0,), (1,), (4,), (12_345_678,)]):
            calls.append(f"plain(p.{function.__name__}({', '.join(f'{n}n' for n in given)}))")
            expected.append(plain(function(*given)))
    found = run_node(f"{SHOW}\nconst p = {script};\nconsole.log(JSON.stringify([{', '.join(calls)}]));")
    for call, theirs, ours in zip(calls, found, expected, strict=True):
        assert theirs == ours, call


@needs_node
def test_errors_are_pythons():
    script = translate({"refuses": refuses})
    body = "try { p.refuses(3n); } catch (e) { console.log(JSON.stringify([e.name, e.message])); }"
    assert run_node(f"const p = {script};\n{body}") == ["OptionError", "--a must be at most 2, got 3"]


@needs_node
@pytest.mark.parametrize(
    "call",
    ["p.arithmetic(1, 2n)", "p.arithmetic(1n)", "p.arithmetic(1n, 0n)", "p.text('x')", "p.records()", "p.inner(null)"],
)
def test_what_python_would_not_take_throws(call):
    script = translate({f.__name__: f for f in (arithmetic, text, records, inner)})
    body = f"let e = null; try {{ {call}; }} catch (error) {{ e = error.name; }} console.log(JSON.stringify(e));"
    assert run_node(f"const p = {script};\n{body}") in ("TypeError", "RangeError")


def division(a: int) -> float:
    return a / 2


def power(a: int) -> int:
    return a**2


def real() -> float:
    return 0.5


def format_of(a: int) -> str:
    return f"{a:.2f}"


def shown(a: str) -> str:
    return f"{a!r}"


def rest(*a: int) -> int:
    return len(a)


def unknown(a: Pair) -> int:
    return a.third  # pyright: ignore[reportAttributeAccessIssue]


def while_(a: int) -> int:
    while a:
        a -= 1
    return a


def walrus(a: int) -> int:
    return (b := a) + b


def caught(a: int) -> int:
    try:
        return a
    finally:
        a += 1


def called(a: int) -> int:
    return print(a)  # pyright: ignore[reportReturnType]


def identity(a: int, b: int) -> bool:
    return a is b


def reserved(a: int) -> int:
    typeof = a
    return typeof


def misnamed() -> Pair:
    return Pair(1, third=2)  # pyright: ignore[reportCallIssue]


def incomplete() -> Pair:
    return Pair(name="x")  # pyright: ignore[reportCallIssue]


def stepped(a: list[int]) -> list[int]:
    return a[::2]


def missing() -> int:
    return nowhere  # noqa: F821 # pyright: ignore[reportUndefinedVariable]


def merged(a: dict) -> dict:
    return {**a}


def several(a: int) -> int:
    b = c = a
    return b + c


@dataclass(frozen=True)
class Fresh:
    items: list[int] = field(default_factory=list)


def fresh() -> Fresh:
    return Fresh()


REFUSED = (
    division,
    power,
    real,
    format_of,
    shown,
    rest,
    unknown,
    while_,
    walrus,
    caught,
    called,
    identity,
    reserved,
    misnamed,
    incomplete,
    stepped,
    missing,
    merged,
    several,
    fresh,
)


@pytest.mark.parametrize("function", REFUSED, ids=lambda f: f.__name__)
def test_what_has_no_translation_is_refused(function):
    with pytest.raises(NotImplementedError, match=r"test_translate|has no translation"):
        translate({"f": function, "Pair": Pair})


@pytest.mark.parametrize("value", [0.5, object(), b"x", {"a": 1j}])
def test_values_without_a_translation(value):
    with pytest.raises(NotImplementedError, match="has no translation"):
        translate({"value": value})
