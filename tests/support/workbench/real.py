"""Real models for tests: skipped with the reason where a package is not installed, converted once into build/."""

import json
from pathlib import Path
from typing import Any

import pytest

from logitless.cli.main import main
from logitless.errors import ConfigError
from logitless.models.pretrained import check_installed
from logitless.workbench.sources.converted import directory_of

CACHE = Path(__file__).parents[3] / "build" / "cache"
PROSE = "The cat sat on the mat and looked out of the window at the birds in the garden."


def real_model(name: str) -> str:
    """The model's name, its files ready; XDG_CACHE_HOME stays as it is for the rest of the test session."""
    try:
        check_installed(name)
    except ConfigError as error:
        pytest.skip(str(error))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(CACHE))
        directory_of(name)
    return name


def told(capsys: pytest.CaptureFixture[str], *arguments: Any) -> dict[str, Any]:
    """What a command that ends well writes with `--json -`."""
    assert main([*map(str, arguments), "--json", "-"]) == 0
    return json.loads(capsys.readouterr().out)


def assert_prose_is_likelier(capsys: pytest.CaptureFixture[str], model: str, folder: Path) -> dict[str, Any]:
    """`logitless score` of a sentence and of its words in disorder; returns the summary."""
    lines = [PROSE, " ".join(sorted(PROSE.split()))]
    (folder / "lines.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    arguments = ("--data", "lines.jsonl", "--documents", "each.jsonl", "--context-length", 64, "--device", "cpu")
    summary = told(capsys, "score", "--model", model, *arguments)
    prose, disorder = (json.loads(line)["perplexity"] for line in (folder / "each.jsonl").read_text().splitlines())
    assert prose < 40 < 100 < disorder
    return summary
