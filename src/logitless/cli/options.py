"""The options of a command: a dataclass read from the command line, and one line for what cannot be read."""

from __future__ import annotations

import ast
import inspect
import io
import re
import shutil
import textwrap
from collections.abc import Sequence
from contextlib import redirect_stderr, suppress
from dataclasses import dataclass, field, fields, make_dataclass
from difflib import get_close_matches
from itertools import groupby, pairwise
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, NoReturn, TypeVar, get_args, get_origin, get_type_hints

import tyro

from ..errors import OptionError
from ..workbench.common.files import check_outputs
from ..workbench.common.options import Option, RunOptions, check_given, check_trusted, read_file, read_table, short
from ..workbench.common.written import RUN_FILE
from ..workbench.runs.rundir import check_own, check_place, stored
from . import verbose

Config = TypeVar("Config")
Options = TypeVar("Options", bound=RunOptions)
SAID = {  # other names of options, of which a command may have one of the second
    "bs": "batch-size",
    "lr": "learning-rate",
    "steps": "max-steps",
    "output": "output-dir out",
    "out": "output-dir",
    "vocab-size": "model",
    "hidden-size": "model",
    **dict.fromkeys(("seq-len", "seq-length", "sequence-length", "max-length", "ctx"), "context-length"),
    **dict.fromkeys(("max-tokens", "max-new-tokens"), "completion-length"),
}
OR_NONE = re.compile(r"no type matching \{None\}.* - <class '\w+'>: ")  # tyro's, of an option without a default
NUMBERS = {  # what Python says of text that is no number
    "invalid literal for int() with base 10:": "expected a whole number, got",
    "could not convert string to float:": "expected a number, got",
    "Exceeds the limit (4300 digits) for integer string conversion:": "expected a whole number of fewer digits:",
    "; use sys.set_int_max_str_digits() to increase the limit": "",
}
HELP = {"-h", "--help"}
EDGES, RULE = " │", frozenset("─-╰╯")  # of a box, drawn in Unicode or in ASCII


def parse(
    kind: type[Config], *, prog: str, description: str, arguments: Sequence[str], default: Config | None = None
) -> Config:
    """`tyro.cli` with its report of an error as one line; raises OptionError, and SystemExit(0) after --help."""
    report = io.StringIO()
    default = kind() if default is None else default
    if not HELP.isdisjoint(arguments):
        _help(default, prog, description)
    options: Any = default
    names = [f.name for f in fields(options)]
    given = [x for argument in arguments for x in (argument.split("=", 1) if argument[:2] == "--" else [argument])]
    for option, value in pairwise(given):
        check_given(kind, option.removeprefix("--").replace("-", "_"), value, option)
    try:
        with redirect_stderr(report):
            return tyro.cli(kind, prog=prog, description=description, args=list(arguments), default=default)
    except SystemExit as stop:
        if not stop.code:
            raise
    raise OptionError(f"{one_line(report.getvalue(), names)} (see {prog} --help)")


def _help(default: Any, prog: str, description: str) -> NoReturn:
    """Prints the help, wrapped: by itself tyro breaks docstrings where the source does, and descriptions nowhere."""
    kind = type(default)
    hints = get_type_hints(kind, include_extras=True)
    said = {name: _shared_help(hint) for name, hint in hints.items()} | _docstrings(kind)
    described = [
        (f.name, _shown_as(hints[f.name], value), field(default=value, metadata={"help": said[f.name]}))
        for f, value in ((f, getattr(default, f.name)) for f in fields(default))
    ]
    width = shutil.get_terminal_size().columns
    paragraphs = description.split("\n\n") + [verbose.HELP] * hasattr(default, "device")
    print("\n\n".join(textwrap.fill(paragraph, width) for paragraph in paragraphs), end="\n\n")
    tyro.cli(make_dataclass(kind.__name__, described), prog=prog, description="", args=["--help"])
    raise SystemExit(0)


def _docstrings(kind: type) -> dict[str, str]:
    """The string below each field of a dataclass and of those that it comes from, as one paragraph."""
    found: dict[str, str] = {}
    for parent in reversed(kind.__mro__[:-1]):
        for node, after in pairwise(ast.parse(inspect.getsource(parent)).body[0].body):  # pyright: ignore
            match node, after:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                    found[name] = " ".join(text.split())
    return found


def _shown_as(kind: Any, value: Any) -> Any:
    """The type of an option for its help, which says what the default means where that is None or nothing."""
    if value == () and get_origin(kind) is tuple:
        return Annotated[kind, tyro.conf.arg(help_behavior_hint="")]
    parts = get_args(get_args(kind)[0] if _shared(kind) else kind)  # of a union with None
    one = next((part for part in parts if part is not NoneType), str)
    if value not in (None, ""):
        return one if NoneType in parts else kind
    required = any(option.required for option in _shared(kind))
    choices = get_args(one) if get_origin(one) is Literal else ()
    name = f"{{{','.join(choices)}}}" if choices else one.__name__.upper()
    return Annotated[kind, tyro.conf.arg(metavar=name, help_behavior_hint="(required)" if required else "")]


def _shared(kind: Any) -> list[Option]:
    return [option for option in getattr(kind, "__metadata__", ()) if isinstance(option, Option)]


def _shared_help(kind: Any) -> str | None:
    """The help of an option that several commands share; what stands below a field goes before it."""
    return next((option.help for option in _shared(kind)), None)


def layered(kind: type[Options], *, prog: str, description: str, arguments: Sequence[str]) -> Options:
    """The options of a run: the command line over --config over what a resumed run was started with.

    Raises OptionError for what cannot be read, ConfigError for a directory without a run.
    """

    def over(base: Options) -> Options:
        return parse(kind, prog=prog, description=description, arguments=arguments, default=base)

    if not HELP.isdisjoint(arguments):
        over(_without_help(kind, prog, arguments).defaults())  # which prints them
    on_the_line = given = over(kind())
    if given.config is not None and given.resume is None:
        given = over(read_file(given.config, kind()))
    base = given.defaults() if given.resume is None else stored(given.resume, kind())
    if given.config is not None:
        base = read_file(given.config, base)
    options = over(base)
    check_trusted(options, on_the_line)
    check_outputs({"json": options.json}, options.inputs())
    check_place(options)
    if (place := options.resume or options.output_dir) is not None:
        check_own(options, place)
    return options


def _without_help(kind: type[Options], prog: str, arguments: Sequence[str]) -> Options:
    """The options beside --help, on which the defaults of others may depend; none where they cannot be read."""
    with suppress(OptionError):
        return parse(kind, prog=prog, description="", arguments=[x for x in arguments if x not in HELP])
    return kind()


@dataclass(frozen=True)
class Whose:
    """What says whose options the others are."""

    method: str | None = None
    resume: Path | None = None
    config: Path | None = None


def method_of(arguments: Sequence[str]) -> str | None:
    """--method, else the one in the file of --config, else that of the run that --resume goes on with."""
    try:
        with redirect_stderr(io.StringIO()):
            given, _ = tyro.cli(Whose, args=list(arguments), return_unknown_args=True, add_help=False)
    except SystemExit:
        return None  # whoever reads all of the options says what is wrong
    tables = [] if given.config is None else [read_table(given.config)]
    named = next((x["resume"] for x in tables if isinstance(x, dict) and isinstance(x.get("resume"), str)), None)
    if (resume := given.resume or named) is not None:
        with suppress(OptionError):  # of a file that is none: `stored` says so
            run = read_table(Path(resume) / RUN_FILE)
            tables.append(run.get("config") if isinstance(run, dict) else None)
    found = [table["method"] for table in tables if isinstance(table, dict) and "method" in table]
    return given.method or next((x if x is None or isinstance(x, str) else short(x) for x in found), None)


def one_line(report: str, names: Sequence[str] = ()) -> str:
    """The sentences of a titled report up to its first rule, and the names of similar options from what follows.

    names: the command's options, among which other spellings (`--model_size`) are looked up.
    """
    _, *rows = [row for row in (line.strip(EDGES) for line in report.splitlines()) if row]
    parts = [list(group) for ruled, group in groupby(rows, lambda row: set(row) <= RULE) if not ruled]
    text = " ".join(" ".join(parts[0]).removeprefix("Error parsing ").split()).removesuffix(".")
    text = OR_NONE.sub("", text.replace("Expected 1 values", "Expected 1 value"))
    for said, meant in NUMBERS.items():
        text = text.replace(said, meant)
    if not text.startswith("Unrecognized"):
        return text
    near = [row.split()[0].rstrip(",") for part in parts[1:] for row in part if row.startswith("--")]
    words = re.findall(r"--[\w-]+", text)
    near += [option for word in words for option in _similar(word, names) if option not in near]
    near = [x for word in words for x in get_close_matches(word, near, n=1, cutoff=0.9)] or near  # one that is sure
    return f"{text}; did you mean {' or '.join(near)}?" if near else text


def _similar(word: str, names: Sequence[str]) -> list[str]:
    """The option that a word may have meant: one that it begins with, else the nearest."""
    text, known = word[2:].replace("_", "-").lower(), [name.replace("_", "-") for name in names]
    begins = [name for name in known if text.startswith(f"{name}-")]
    near = begins[:1] or get_close_matches(text, known, n=1, cutoff=0.7) or SAID.get(text, "").split()
    return [f"--{name}" for name in near if name in known]
