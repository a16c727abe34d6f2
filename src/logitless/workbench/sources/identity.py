"""What tells a text, a tokenizer and a model from all others: hashes of their content, wherever it lies."""

from __future__ import annotations

import json
from pathlib import Path

from ...hashes import hash_of
from ..common.sealed import hashes_of, together
from .corpus import files_below, is_arrow
from .model import ModelSource
from .tokenizer import TextTokenizer

READ = ("config.json", "*.safetensors", "tokenizer*", "*.jinja")  # of a model's directory


def known_of(tokenizer: TextTokenizer) -> str:
    """A hash of what a tokenizer does, wherever it lies."""
    saved = tokenizer.saved
    fast, special = getattr(saved, "backend_tokenizer", None), saved.special_tokens_map
    rules = saved.get_vocab() if fast is None else fast.to_str()
    values = [rules, {name: str(token) for name, token in special.items()}, saved.split_special_tokens]
    return hash_of(json.dumps(values, sort_keys=True, default=str).encode())


def files_of(option: str, source: ModelSource) -> dict[str, str]:
    """What tells the files that are read of an option's model from all others; of a hub id, its commit."""
    given = f"--{option} {source.name}"
    if Path(source.name).is_file() and source.weights is None:
        return {given: hash_of(Path(source.name))}
    if source.weights is None:
        return {}
    place = Path(source.weights)
    if not place.is_dir():
        return {f"the commit of {given}": str(getattr(source.config, "_commit_hash", None))}
    names = (path.name for pattern in READ for path in place.glob(pattern))
    return {f"{name} of {given}": found for name, found in hashes_of(place, names).items()}


def text_files(path: Path, written: tuple[Path, ...] = ()) -> list[Path]:
    """The files below a path that hold its text, in one order on every machine; what is `written` there does not."""
    if path.is_file():
        return [path]
    return sorted(f for f in path.rglob("*") if f.is_file()) if is_arrow(path) else files_below(path, written)


def hash_of_text(path: Path, written: tuple[Path, ...] = ()) -> str:
    """What tells the text below a path from all others, whatever its files are called."""
    return together(hash_of(f) for f in text_files(path, written))
