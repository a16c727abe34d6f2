"""One micro model and corpus for all training tests."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from logitless.workbench.align.config import AlignConfig
from logitless.workbench.sft import run as sft
from logitless.workbench.sft.config import TrainConfig
from tests.support.workbench.micro import CONTEXT, line_corpus, micro_corpus, micro_directory
from tests.support.workbench.unmeasured import leave_unmeasured


@pytest.fixture(scope="session")
def micro(tmp_path_factory) -> SimpleNamespace:
    """config: options of a run of a few seconds; model, data: its paths."""
    root: Path = tmp_path_factory.mktemp("micro")
    model, data = micro_directory(root / "model"), micro_corpus(root / "data")
    config = TrainConfig(
        model=str(model),
        data=str(data),
        context_length=CONTEXT,
        batch_size=2,
        max_steps=10,
        learning_rate=1e-2,
        loss="logitless",
        device="cpu",
    )
    return SimpleNamespace(model=model, data=data, config=config)


@pytest.fixture(scope="session")
def start(micro, tmp_path_factory) -> AlignConfig:
    """Options of an alignment run of a few seconds, on a micro model that knows a little."""
    root: Path = tmp_path_factory.mktemp("align")
    data = line_corpus(root / "data", 20)  # one of which is held out
    measure, sft.measure = sft.measure, lambda config, tokens: {m: {"not_measured": ""} for m in ("logitless", "dense")}
    sft.run(replace(micro.config, data=str(data), max_steps=30, output_dir=root / "base"), Console(quiet=True))
    sft.measure = measure
    return AlignConfig(
        model=str(root / "base" / "model"),
        data=str(data),
        prompt_length=24,
        completion_length=12,
        batch_size=4,
        generations_per_prompt=2,
        max_steps=4,
        learning_rate=2e-3,
        device="cpu",
    )


@pytest.fixture
def unmeasured(monkeypatch) -> None:
    """Skips the measurement in a process of its own: most tests are about something else."""
    leave_unmeasured(monkeypatch)
