"""`logitless COMMAND`: finds the command and turns errors into one line and an exit status."""

from __future__ import annotations

import errno
import gc
import os
import sys
from contextlib import suppress
from importlib import import_module
from io import TextIOWrapper
from typing import TYPE_CHECKING

from ..errors import LogitlessError, OptionError, is_out_of_memory
from ..printable import on_one_line
from .verbose import OPTION, listening

if TYPE_CHECKING:
    from collections.abc import Sequence

# A command is a module beside this one with `main(arguments) -> exit status`; help for it imports nothing more.
COMMANDS = {
    "plan": "what a run needs on each GPU, phase by phase, and a setting that fits",
    "profile": "where the memory of a training step goes, traced without a GPU, and what would help",
    "demo": "a small real model scored, sampled and fine-tuned in a few minutes, with a page of what changed",
    "train": "train a causal language model on text, without its logits",
    "align": "align a model by its own certainty, by rewards or by preferences (TRL)",
    "score": "log-prob, rank, entropy and best entries of each token of existing text, as parquet",
    "eval": "perplexity, accuracy and calibration on text or tasks, and the distance between two models",
    "sample": "sample text, with each token's probability, rank, entropy and alternatives",
    "doctor": "what this machine has, which backends can run on it, and what typical calls would cost",
    "verify": "check the logitless loss against the dense one, and show where each is used",
}
SAID = {  # other words for a command, and what they ask for
    "help": "--help",
    "version": "--version",
    "check": "verify",
    "evaluate": "eval",
    "perplexity": "eval",
    "memory": "profile",
    **dict.fromkeys(("finetune", "fine-tune", "pretrain", "sft"), "train"),
    **dict.fromkeys(("generate", "infer", "inference", "complete", "chat"), "sample"),
    **dict.fromkeys(("rl", "rlhf"), "align"),
    **{
        name: f"align --method {name}"
        for name in ("intuitor", "grpo", "rloo", "dpo", "ste", "gumbel", "reinforce", "ppo")
    },
}
DONE, BAD_INPUT, INTERRUPTED = 0, 2, 130
BEGINS, ENDS = 800, 300  # characters of a line about what is wrong that are shown, whatever was given


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns 0 done, 1 a check failed or numbers are not finite, 2 bad input, 130 interrupted."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    joined = _in_a_group()
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # an encoding without some sign is no reason to end; JSON is ASCII
    with listening(given) as left:
        status = _told(left[0] if left else "--help", left[1:])
    if _in_a_group() and not joined:
        _leave_the_other_ranks(status)
    return status if left else BAD_INPUT


def _told(command: str, arguments: Sequence[str]) -> int:
    """The exit status of a command, its error on one line."""
    try:
        return _run(command, arguments)
    except LogitlessError as error:
        _fail(str(error))
        return error.exit_status
    except KeyboardInterrupt as stop:
        print(f"interrupted; {stop}" if str(stop) else "interrupted", file=sys.stderr)
        return INTERRUPTED
    except ModuleNotFoundError as error:
        name = _absent(error)
        if not name or name.startswith("logitless"):
            raise
        if name in sys.stdlib_module_names:
            return _fail(f"{command} needs {name}, a module of Python's own that is not on this system")
        from ..versions import installing

        extras = "train,rl" if command == "align" else "train"
        return _fail(f"{command} needs {name}: {installing(extras)}")
    except BrokenPipeError:
        sys.stdout = None  # the reader left (`| head`): nothing more to say, and nothing to flush at exit
        return DONE
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        why = str(error).strip().partition("\n")[0][:200]
        return _fail(f"{command}: out of memory{f' ({why})' if why else ''}: use smaller sizes")
    except OSError as error:
        if error.strerror is None:
            raise
        remedy = ": give a shorter one" if error.errno == errno.ENAMETOOLONG else ""
        return _fail(f"{error.filename or command}: {error.strerror}{remedy}")


def _absent(error: BaseException | None) -> str:
    """The module that an import did not find; transformers' own error names none, but what it came of does."""
    while error is not None:
        if isinstance(error, ModuleNotFoundError) and error.name:
            return error.name
        error = error.__cause__
    return ""


def _run(command: str, arguments: Sequence[str]) -> int:
    if command in ("-h", "--help"):
        print(_help())
        return DONE
    if command == "--version":
        from .. import __version__

        print(f"logitless {__version__}")
        return DONE
    if command not in COMMANDS:
        from difflib import get_close_matches

        near = get_close_matches(command.lower(), [*COMMANDS, "--help", "--version", *SAID], n=1, cutoff=0.7)
        hint = f"did you mean {SAID.get(near[0], near[0])}?" if near else f"commands are {', '.join(COMMANDS)}"
        raise OptionError(f"unknown command {command!r}; {hint}")
    from ..workbench.common.signals import interrupted_by_signals

    with interrupted_by_signals():  # so that a file half written is taken away
        return import_module(f"{__package__}.{command}").main(arguments)


def _leave_the_other_ranks(status: int) -> None:
    """Ends the threads of this rank's groups: one that frees a tensor while Python ends aborts it (pytorch#179291)."""
    if status != DONE:  # its groups may hold work that waits for the others, who are told by the end of this process
        for stream in (sys.stdout, sys.stderr):
            with suppress(AttributeError, OSError):  # a reader that left
                stream.flush()
        os._exit(status)
    gc.collect()  # wrapped models hold their groups, and must not be the last: they would wait with the GIL held
    sys.modules["torch.distributed"].destroy_process_group()


def _in_a_group() -> bool:
    distributed = sys.modules.get("torch.distributed")
    return bool(distributed and distributed.is_available() and distributed.is_initialized())


def _fail(message: str) -> int:
    line = on_one_line(message)
    if len(line) > BEGINS + ENDS:
        line = f"{line[:BEGINS]} ... {line[-ENDS:]}"
    print(f"logitless: {line}", file=sys.stderr)
    return BAD_INPUT


def _help() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {what}" for name, what in COMMANDS.items()]
    return "\n".join(
        [
            "usage: logitless COMMAND [options]",
            "",
            "Train language models without ever materialising the vocabulary-sized logits tensor.",
            "",
            *lines,
            "",
            "  --version  print the version        COMMAND --help  the options of a command",
            f"  {OPTION}  say on stderr which backend each kind of call takes, and why not another",
        ]
    )
