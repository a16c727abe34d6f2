"""Which options of a command a test has not given, and options in files of --config."""

import json
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml

from logitless.workbench.common.options import INVOCATION


def at_default(*configs: Any) -> set[str]:
    """The options of a dataclass that none of its instances sets, beside those of an invocation."""
    options = [field for field in fields(configs[0]) if field.name not in INVOCATION]
    return {x.name for x in options if all(getattr(config, x.name) == x.default for config in configs)}


def in_a_file(options: dict[str, Any], path: Path) -> Path:
    """Options as a file of the path's kind, a YAML, JSON or TOML one; of those that are None, TOML has none."""
    plain = {name: str(value) if isinstance(value, Path) else value for name, value in options.items()}
    match path.suffix:
        case ".yaml":
            text = yaml.safe_dump(plain, allow_unicode=True)
        case ".json":
            text = json.dumps(plain)
        case _:
            given = {name: value for name, value in plain.items() if value is not None}
            text = "".join(f"{name} = {json.dumps(value, ensure_ascii=False)}\n" for name, value in given.items())
    path.write_text(text, encoding="utf-8")
    return path


def assert_files_mean(parse: Callable[[list[str]], Any], config: Any, place: Path) -> None:
    """A file with all of a run's options, whatever kind it is of, is read as that run."""
    for suffix in (".yaml", ".json", ".toml"):
        file = in_a_file(config.to_dict(), place / f"options{suffix}")
        assert parse(["--config", str(file), "--trust-config"]).to_dict() == config.to_dict(), suffix
