"""Options in a file of --config mean what they mean on the command line."""

from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from logitless.cli import align, train
from logitless.errors import LogitlessError
from logitless.workbench.align.config import AlignConfig
from logitless.workbench.common.options import INVOCATION, kinds_of
from logitless.workbench.grade.config import GradeConfig
from logitless.workbench.sft.config import TrainConfig
from tests.support.workbench.options import in_a_file

COMMANDS = {
    "train": (train.parse, TrainConfig()),
    "align": (align.parse, AlignConfig()),
    "align --method ste": (align.parse_grade, GradeConfig()),
}
TEXTS = (
    "10GB",
    "1e-4",
    "0x10",
    "yes",
    "null",
    "~",
    "nan",
    "1_000",
    "a b",
    "é",
    "#",
    "'",
    '"',
    "2026-11-25",
    "[1]",
    "a:b",
)
VALUES: dict[Any, st.SearchStrategy] = {
    bool: st.booleans(),
    int: st.integers(-1, 300) | st.sampled_from([2**31, 2**63, 10**20]),
    float: st.floats(-1, 3, allow_subnormal=False) | st.sampled_from([1e-5, 1e22, 2, 0]),
    str: st.sampled_from((*TEXTS, "")),
    Path: st.sampled_from(TEXTS).map(Path),
}


def values_of(kind: Any) -> st.SearchStrategy:
    """Values of an option's type, those without a meaning too."""
    parts = get_args(kind)
    if get_origin(kind) is Literal:
        return st.sampled_from(parts)
    return VALUES[next((part for part in parts if part is not NoneType), kind)]


def options_of(config: Any) -> st.SearchStrategy:
    """A few of a command's options, with values: of many, one is always without a meaning."""
    kinds = {name: kind for name, kind in kinds_of(config).items() if name not in INVOCATION}
    chosen = st.lists(st.sampled_from(sorted(kinds)), min_size=1, max_size=3, unique=True)
    return chosen.flatmap(lambda names: st.fixed_dictionaries({name: values_of(kinds[name]) for name in names}))


def on_the_line(options: dict[str, Any]) -> list[str]:
    """The same as arguments."""
    flags = {True: "--{}", False: "--no-{}"}
    return [
        flags[value].format(name.replace("_", "-"))
        if isinstance(value, bool)
        else f"--{name.replace('_', '-')}={value}"
        for name, value in options.items()
    ]


def outcome(parse: Any, arguments: list[str]) -> Any:
    """The options, or that there are none."""
    try:
        return parse(arguments).to_dict()
    except LogitlessError:
        return "refused"


SUFFIXES = (".yaml", ".yaml", ".json", ".toml")  # YAML has the most rules of its own for what is text


@pytest.mark.parametrize("command", COMMANDS)
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(suffix=st.sampled_from(SUFFIXES), data=st.data())
def test_a_file_means_what_the_command_line_means(command, tmp_path, monkeypatch, suffix, data):
    monkeypatch.chdir(tmp_path)
    parse, config = COMMANDS[command]
    options = data.draw(options_of(config))
    trusted = ["--trust-config"]
    file = in_a_file(options, tmp_path / f"given{suffix}")
    assert outcome(parse, [*trusted, "--config", str(file)]) == outcome(parse, [*trusted, *on_the_line(options)])
