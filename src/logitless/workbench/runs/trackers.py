"""Where metrics go beside metrics.jsonl: trackio, tensorboard or wandb, by transformers' callbacks or by accelerate."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ...errors import OptionError, in_one_line
from ..common.options import RunOptions

PROJECT = "logitless"  # unless the environment's WANDB_PROJECT or TRACKIO_PROJECT says otherwise
TENSORBOARD_PLACE = "runs"  # in the run's directory, as by transformers
Send = Callable[[Mapping[str, Any], int], None]


def check_tracker(name: str) -> None:
    """OptionError where the library that --report-to names is not there, or wandb has no login."""
    if name != "none" and name not in sys.modules and find_spec(name) is None:
        raise OptionError(f"--report-to {name} needs it installed: pip install {name}")
    if name == "wandb":
        os.environ.setdefault("WANDB_PROJECT", PROJECT)  # transformers' callback asks the environment alone
        if os.environ.get("WANDB_MODE", "online") == "online":  # others stay on this machine
            with _explained(name):
                log_in()


def log_in() -> None:
    """Has wandb ask for its key now, not when the first step begins."""
    import wandb  # pyright: ignore[reportMissingImports]

    wandb.login()


def project(name: str) -> str:
    """The project that a tracker's runs are put into."""
    return os.environ.get(f"{name.upper()}_PROJECT", PROJECT)


@contextmanager
def reporting(config: RunOptions, report_to: str, place: Path) -> Iterator[Send]:
    """For a loop without a Trainer: what it yields sends a step's numbers to a tracker, by the names that they have.

    Raises OptionError where the tracker does not start, such as without a login.
    """
    if report_to == "none":
        yield lambda metrics, step: None
        return
    tracker = _started(config, report_to, place)
    try:
        tracker.store_init_configuration({k: v if _plain(v) else str(v) for k, v in config.to_dict().items()})

        def send(metrics: Mapping[str, Any], step: int) -> None:
            tracker.log({k: v for k, v in metrics.items() if isinstance(v, int | float)}, step=step)

        yield send
    finally:
        tracker.finish()


def _plain(value: Any) -> bool:
    return isinstance(value, bool | int | float | str)


def _started(config: RunOptions, report_to: str, place: Path) -> Any:
    from accelerate import PartialState
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    from .trainer import on_processors

    PartialState(cpu=on_processors(config))  # accelerate's own messages ask it which rank this is
    kind = LOGGER_TYPE_TO_CLASS[report_to]
    if report_to == "tensorboard":
        folder = os.environ.get("TENSORBOARD_LOGGING_DIR", str(place / TENSORBOARD_PLACE))
        tracker = kind(place.name, folder)
    elif report_to == "trackio":
        tracker = kind(project(report_to), name=place.name, resume="allow")
    else:
        tracker = kind(project(report_to), name=place.name)
    with _explained(report_to):
        tracker.start()
    return tracker


def explain_failures(trainer: Any, report_to: str) -> None:
    """Has a Trainer raise OptionError where its tracker does not start, such as without a login."""
    from transformers.integrations.integration_utils import get_reporting_integration_callbacks

    kinds = tuple(get_reporting_integration_callbacks(report_to))
    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, kinds):
            callback.on_train_begin = _explained(report_to)(callback.on_train_begin)


@contextmanager
def _explained(report_to: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # each library fails in its own way
        why = in_one_line(error)
        raise OptionError(f"--report-to {report_to}: {why}") from error
