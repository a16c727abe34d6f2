"""A micro model with weights, and documents for it."""

import json
from pathlib import Path

import pytest

from logitless.workbench.scoring import block, documents
from logitless.workbench.scoring.config import ScoreConfig
from tests.support.workbench.micro import micro_directory, micro_model


@pytest.fixture(scope="session")
def micro(tmp_path_factory) -> Path:
    """The directory of a Qwen3 of 64 positions over bytes."""
    place = tmp_path_factory.mktemp("scored") / "model"
    micro_directory(place)
    micro_model().save_pretrained(place)
    return place


@pytest.fixture
def small_blocks(monkeypatch) -> None:
    """Blocks of a few documents, so that a small corpus has many."""
    monkeypatch.setattr(documents, "PIECE", 400)
    monkeypatch.setattr(block, "PIECE", 400)


def corpus(path: Path, documents: int = 30) -> Path:
    """A .jsonl of documents of 1 to 150 bytes, one of them long, with a bad line now and then."""
    lines = []
    for i in range(documents):
        text = "".join(chr(97 + (i * k * k + k) % 26) for k in range(1 + (i * 37) % 150)) + "\nä"
        lines.append(json.dumps({"text": text * (6 if i == 7 else 1)}))
        if i % 9 == 4:
            lines.append('{"text": ')
    path.write_text("\n".join(lines) + "\n")
    return path


def config(micro: Path, data: Path, out: Path, **more: object) -> ScoreConfig:
    given = {"device": "cpu", "batch_tokens": 256, **({} if more.get("store") == "hidden" else {"keep": 3}), **more}
    return ScoreConfig(model=str(micro), data=str(data), out=out, **given)
