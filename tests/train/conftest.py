"""One micro model and corpus for all training tests."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from logitless.train.config import TrainConfig
from tests.train.micro import CONTEXT, micro_corpus, micro_directory


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
        loss="chunked",
        device="cpu",
    )
    return SimpleNamespace(model=model, data=data, config=config)


@pytest.fixture
def unmeasured(monkeypatch) -> None:
    """Skips the measurement in a process of its own: most tests are about something else."""
    nothing = {"chunked": {"not_measured": "test"}, "dense": {"not_measured": "test"}}
    monkeypatch.setattr("logitless.train.sft.measure", lambda config, tokens: nothing)
