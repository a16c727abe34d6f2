"""Commands, help and exit statuses."""

import re
import subprocess
import sys
from contextlib import redirect_stdout
from functools import cache
from importlib.metadata import PackageNotFoundError
from io import BytesIO, StringIO, TextIOWrapper
from itertools import pairwise

import pytest

from logitless.cli.main import BEGINS, COMMANDS, ENDS, SAID, main
from logitless.versions import installing
from logitless.workbench.align.config import METHODS
from logitless.workbench.common.space import OutOfSpace
from logitless.workbench.grade.config import GRADE_METHODS
from logitless.workbench.runs.ending import Interrupted


def test_help_names_every_command(capsys):
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in COMMANDS)
    assert main([]) == 2


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("logitless ")


def test_the_package_is_the_command_line():
    done = subprocess.run([sys.executable, "-m", "logitless", "--version"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.split()[0]) == (0, "logitless"), done.stderr


def test_an_encoding_without_some_signs_shows_the_others(monkeypatch):
    """As of a latin-1 locale, or of a file that a console's output goes to on Windows."""
    written = BytesIO()
    monkeypatch.setattr(sys, "stdout", TextIOWrapper(written, encoding="ascii"))
    assert main(["plan", "--model", "qwen3-4b"]) == 0
    sys.stdout.flush()
    assert b"8 ? 2,048 tokens" in written.getvalue()


def test_an_unknown_command(capsys):
    assert main(["trian"]) == 2
    assert "unknown command 'trian'; did you mean train?" in capsys.readouterr().err
    assert main(["xyz"]) == 2
    assert "commands are plan, profile" in capsys.readouterr().err


def test_a_value_of_any_length_is_a_line_of_some(capsys):
    assert main(["plan", "--batch-size", "9" * 5000]) == 2
    assert "expected a whole number of fewer digits: value has 5000 digits (see" in capsys.readouterr().err
    for given in (["plan", "--gpus", "x" * 5000], ["plan", "--model", f"a/{'b' * 5000}"], ["x" * 5000]):
        assert main(given) == 2
        assert 1000 < len(capsys.readouterr().err) < 1200
    assert main(["x"]) == 2
    rest = len(capsys.readouterr().err.removeprefix("logitless: ").strip()) - 1
    for most, cut in ((BEGINS + ENDS, False), (BEGINS + ENDS + 1, True)):
        assert main(["x" * (most - rest)]) == 2
        assert (" ... " in capsys.readouterr().err) == cut


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("help", "--help"),
        ("--verion", "--version"),
        ("generate", "sample"),
        ("grpo", "align --method grpo"),
        ("ppo", "align --method ppo"),
        ("gumbel", "align --method gumbel"),
        ("Finetune", "train"),
        ("SCORE", "score"),
        ("infer", "sample"),
        ("serve", None),
    ],
)
def test_what_people_type_leads_to_the_command(word, meant, capsys):
    assert main([word]) == 2
    assert (f"; did you mean {meant}?" if meant else "; commands are plan, ") in capsys.readouterr().err


def test_other_words_lead_to_what_is_there():
    for words in map(str.split, SAID.values()):
        assert words[0] in (*COMMANDS, "--help", "--version")
        assert words[2:] == [] or words[2] in (*METHODS, *GRADE_METHODS)


def test_an_interruption_before_the_command_begins_is_one_line(monkeypatch, capsys):
    """While its module is imported, or earlier: what is imported before that point is next to nothing."""

    def interrupted(name):
        raise KeyboardInterrupt

    monkeypatch.setattr("logitless.cli.main.import_module", interrupted)
    assert main(["train"]) == 130
    assert capsys.readouterr().err == "interrupted\n"
    code = "import sys; before = set(sys.modules); import logitless.cli.main; print(*set(sys.modules) - before)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert {"dataclasses", "importlib.metadata", "inspect", "tyro", "rich", "numpy"}.isdisjoint(done.stdout.split())


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_a_command_imports_no_torch(command):
    code = (
        "import sys\nfrom logitless.cli.main import main\n"
        f"try:\n    main([{command!r}, '--help'])\nexcept SystemExit as stop:\n    assert not stop.code\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert f"logitless {command}" in done.stdout
    assert "LITERAL" not in done.stdout  # but the words themselves


IN_A_GROUP = """
from pathlib import Path
import torch.distributed.nn.functional  # its functions' defaults hold a group that is there before it
from torch.distributed import HashStore, init_process_group, is_initialized
from torch.nn.parallel import DistributedDataParallel
from torch import nn
from logitless.cli import doctor, main

def threads():
    return [x.read_text().strip() for x in Path("/proc/self/task").glob("*/comm")].count("pt_gloo_runloop")

def command(arguments):
    init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    wrapped = DistributedDataParallel(nn.Linear(2, 2))
    wrapped.itself = [wrapped]
    assert threads()
    return 0

doctor.main = command
assert main.main(["doctor"]) == 0
assert not is_initialized() and not threads()
init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
doctor.main = lambda arguments: 0
assert main.main(["doctor"]) == 0
assert is_initialized()  # a caller's own
"""
FAILED_IN_A_GROUP = """
import atexit
from torch.distributed import HashStore, init_process_group
from logitless.cli import doctor, main
from logitless.errors import OptionError

def command(arguments):
    init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    print("so far", end="")
    raise OptionError("no")

doctor.main = command
atexit.register(print, "Python ends")
raise SystemExit(main.main(["doctor"]))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counts threads in /proc")
def test_a_rank_leaves_the_others_before_python_ends():
    """gloo's threads abort a Python that shuts down under them."""
    done = subprocess.run([sys.executable, "-c", IN_A_GROUP], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_rank_that_failed_ends_at_once():
    """It leaves nobody, which could wait for the others, nor does Python end around its threads."""
    command = [sys.executable, "-c", FAILED_IN_A_GROUP]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (2, "so far", "logitless: no\n")


def lazily(name: str) -> ModuleNotFoundError:
    """What transformers raises, which imports its parts on first use, where one of them needs this module."""
    error = ModuleNotFoundError("Could not import module 'Trainer'.")
    error.__cause__ = ModuleNotFoundError(f"No module named {name!r}", name=name)
    return error


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (Interrupted("logitless train --resume x goes on from step 3"), 130, "interrupted; logitless train --resume x"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (OutOfSpace("no space left at x"), 2, "logitless: no space left at x"),
        (
            MemoryError("3 GiB are not there\nat all"),
            2,
            "logitless: train: out of memory (3 GiB are not there): use smaller",
        ),
        (PermissionError(13, "Permission denied", "/x.json"), 2, "logitless: /x.json: Permission denied"),
        (OSError(27, "File too large"), 2, "logitless: train: File too large"),
        (OSError(36, "File name too long", "nn"), 2, "logitless: nn: File name too long: give a shorter one"),
        (ModuleNotFoundError("No module named 'peft'", name="peft"), 2, "train needs peft: pip install"),
        (lazily("peft"), 2, "train needs peft: pip install"),
        (lazily("resource"), 2, "train needs resource, a module of Python's own that is not on this system\n"),
    ],
)
def test_errors_are_one_line(monkeypatch, capsys, error, status, line):
    def fail(arguments):
        raise error

    monkeypatch.setattr("logitless.cli.train.main", fail)
    assert main(["train"]) == status
    err = capsys.readouterr().err
    assert line in err
    assert err.count("\n") == 1


def test_extras_of_a_source_tree_are_installed_from_it(monkeypatch):
    def missing(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.version", missing)
    assert installing("train,rl") == "pip install '.[train,rl]' in the clone"


def test_a_defect_is_not_hidden(monkeypatch):
    def fail(arguments):
        raise RuntimeError("a defect")

    monkeypatch.setattr("logitless.cli.train.main", fail)
    with pytest.raises(RuntimeError, match="a defect"):
        main(["train"])


@cache
def help_of(command: str) -> list[str]:
    """The lines of a command's help in a terminal of 100 columns."""
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(StringIO()) as out:
        patch.setenv("COLUMNS", "100")
        with pytest.raises(SystemExit) as stop:
            main([*command.split(), "--help"])
    assert not stop.value.code
    return out.getvalue().splitlines()


each_help = pytest.mark.parametrize("command", [*COMMANDS, "align --method all"])


@each_help
def test_help_says_what_is_left_out_in_words(command):
    """No option shows Python's None, or a default twice, and what has to be given is said to be required."""
    text = " ".join(line.strip("│ ") for line in help_of(command))
    assert "None" not in text
    assert "(default: )" not in text
    options = re.split(r" (?=--[a-z-]+[ ,])", text)
    assert len(options) > 3
    assert [option for option in options if "Default: " in option and "(default: " in option] == []
    (data,) = [option for option in options if option.startswith("--data STR")] or [""]
    assert data.endswith("(required)") is (command == "score")


@each_help
def test_help_is_wrapped_where_a_line_is_full(command):
    """No line is longer than the terminal, and none within a sentence ends where the next word would have fitted."""
    lines = help_of(command)
    assert max(map(len, lines)) <= 100
    assert any(line.startswith(f"usage: logitless {command.split()[0]}") for line in lines)
    rows = [line.strip("│").rstrip() for line in lines if line.startswith("│")]
    for row, following in pairwise(rows):
        told, more = row.strip(), following.strip()
        goes_on = row.startswith("   ") and following.startswith("   ") and not told.endswith(")")
        assert not goes_on or len(row) + len(more.split()[0]) + 1 > 95, (row, following)
