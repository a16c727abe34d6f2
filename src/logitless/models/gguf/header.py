"""What stands before the weights of a GGUF file."""

from __future__ import annotations

import math
import re
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

from ...algebra.options import is_number
from ...errors import ConfigError

MAGIC, VERSIONS = b"GGUF", (2, 3)
STRING, ARRAY = 8, 9
# The other types of values, as `struct` names them.
PLAIN = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
# What a header calls the fields of transformers' configurations.
FIELDS = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.sliding_window": "sliding_window",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
MODEL_TYPES = {"gemma3": "gemma3_text", "qwen2moe": "qwen2_moe", "qwen3moe": "qwen3_moe"}
EMBEDDING, OUTPUT = "token_embd.weight", "output.weight"
ELSEWHERE = "load this model from its transformers directory"  # where a file cannot be read as it is meant
LLAMA3 = "rope_freqs.weight"  # by what each frequency is divided
FACTORS = (LLAMA3, "rope_factors_long.weight", "rope_factors_short.weight")  # tensors that are no weights
LAYER = re.compile(r"blk\.\d+\.")  # a tensor of one


@dataclass(frozen=True)
class Header:
    """What stands before the weights: `values` without arrays, and each tensor's shape as torch has it."""

    architecture: str
    values: dict[str, Any]
    shapes: dict[str, tuple[int, ...]]

    @property
    def own(self) -> dict[str, Any]:
        """The values that the architecture has, by names without it."""
        prefix = f"{self.architecture}."
        return {key.removeprefix(prefix): value for key, value in self.values.items() if key.startswith(prefix)}


def file_of(name: str) -> Path | None:
    """The GGUF file that a name leads to: FILE.gguf, DIR:FILE.gguf, or a directory that holds nothing else to load.

    None where it is no name of one. Raises ConfigError for a file that is not there, and for a choice of several.
    """
    path = Path(name)
    if path.is_dir():
        found = [] if (path / "config.json").exists() else sorted(path.glob("*.gguf"))
        if len(found) > 1:
            raise ConfigError(
                f"--model {name}: this directory has {len(found)} GGUF files; name one, as {name}:{found[0].name}"
            )
        return found[0] if found else None
    if path.suffix.lower() != ".gguf":
        return None
    folder, colon, file = name.rpartition(":")
    if colon and not path.exists():
        path = Path(folder) / file
    if not path.is_file():
        raise ConfigError(f"--model {name}: expected a GGUF file, there is none at {path}")
    return path


def read_header(path: Path) -> Header:
    """A file's header, without its weights.

    Raises ConfigError for what is no GGUF file, for a damaged one, for one of several parts, and for one whose tensors
    are of other sizes.
    """
    try:
        with path.open("rb") as file:
            header = _Reader(file, path.stat().st_size).header()
    except OSError as error:
        raise ConfigError(f"--model {path}: {error.strerror}") from None
    except _OtherFile as error:
        raise ConfigError(f"--model {path}: {error}") from None
    except (struct.error, UnicodeDecodeError, LookupError, ValueError):
        raise ConfigError(f"--model {path}: this GGUF file is damaged or cut short; get it anew") from None
    _check_layers(path, header)
    _check_sizes(path, header)
    return header


def _check_layers(path: Path, header: Header) -> None:
    said, found = header.own.get("block_count"), {name.split(".")[1] for name in header.shapes if LAYER.match(name)}
    if found and (said != len(found) or found != set(map(str, range(len(found))))):
        raise ConfigError(
            f"--model {path}: this GGUF file is damaged: its header says {said} layers, its tensors are of "
            f"{len(found)}; get it anew"
        )


def _check_sizes(path: Path, header: Header) -> None:
    """ConfigError where tensors have other shapes than the header's sizes, of which a model would be made first."""
    own = header.own
    width, inner = own.get("embedding_length"), own.get("feed_forward_length")
    experts = own.get("expert_count"), width, own.get("expert_feed_forward_length", inner)
    expected = {
        EMBEDDING: (own.get("vocab_size"), width),
        "ffn_down.weight": (width, inner),
        "ffn_down_exps.weight": experts,
    }
    heads, of_keys = own.get("attention.head_count"), own.get("attention.head_count_kv")
    of_head = own.get("attention.key_length", width // heads if heads and width else None)
    if of_keys and of_head is not None and "attention.key_length_swa" not in own:  # heads of one size in all layers
        expected["attn_k.weight"] = (of_keys * of_head, width)
    for name, shape in header.shapes.items():
        sizes = zip(expected.get(LAYER.sub("", name), shape), shape, strict=False)
        said = tuple(there if size is None else size for size, there in sizes)
        if said != shape:
            raise ConfigError(
                f"--model {path}: this GGUF file is damaged: {name} has shape {shape}, where its header says {said}; "
                "get it anew"
            )


def check_numbers(path: Path, header: Header, read: int) -> None:
    """ConfigError where a file's tensors hold more or fewer numbers than the model that is made of it."""
    held = sum(prod(shape) for name, shape in header.shapes.items() if name not in FACTORS)
    if held != read:
        raise ConfigError(
            f"--model {path}: its tensors hold {held:,} numbers, the {header.architecture} model that is read from it "
            f"{read:,}: it would be another one; {ELSEWHERE}"
        )


def config_fields(path: Path, header: Header) -> dict[str, Any]:
    """What a header says of the model's shape, by the names of transformers' configurations. Raises ConfigError."""
    values, scaling = header.own, linear_scaling(header)
    if EMBEDDING not in header.shapes:
        raise ConfigError(f"--model {path}: expected a language model, this GGUF file has no {EMBEDDING}")
    return {
        "model_type": MODEL_TYPES.get(header.architecture, header.architecture),
        "vocab_size": header.shapes[EMBEDDING][0],
        "tie_word_embeddings": OUTPUT not in header.shapes,
        **{field: values[key] for key, field in FIELDS.items() if values.get(key)},
        **({"rope_scaling": scaling} if scaling else {}),
    }


def linear_scaling(header: Header) -> dict[str, Any]:
    """What stretches the positions evenly, by the names of transformers' configurations; nothing where nothing does."""
    kind, factor = header.own.get("rope.scaling.type"), header.own.get("rope.scaling.factor", 1.0)
    if kind != "linear" or not is_number(factor) or not 0 < factor < math.inf:
        return {}
    return {"rope_type": "linear", "factor": float(factor)}


class _OtherFile(Exception):
    """No GGUF file, of another version, or a part of one."""


class _Reader:
    """Reads values one after the other. Raises struct.error and others where the file ends early or makes no sense."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self.file, self.size = file, size

    def header(self) -> Header:
        magic = self.file.read(len(MAGIC))
        if magic != MAGIC:
            raise _OtherFile(f"expected a GGUF file, which begins with {MAGIC.decode()}, got one that does not")
        version = self.plain("I")
        if version not in VERSIONS:
            known = " or ".join(map(str, VERSIONS))
            raise _OtherFile(f"expected GGUF version {known}, got {version}; convert it with a newer llama.cpp")
        tensors, count = self.plain("Q"), self.plain("Q")
        values = {}
        for _ in range(count):
            key = self.string()
            value = self.value(self.plain("I"))
            if value is not None:
                values[key] = value
        if (parts := values.get("split.count", 1)) > 1:
            raise _OtherFile(
                f"this is one of {parts} parts of a GGUF file; join them with llama.cpp's llama-gguf-split --merge, "
                "and give the whole file"
            )
        shapes = dict(self.tensor() for _ in range(tensors))
        return Header(str(values["general.architecture"]), values, shapes)

    def plain(self, kind: str) -> Any:
        return struct.unpack(f"<{kind}", self.file.read(struct.calcsize(f"<{kind}")))[0]

    def string(self) -> str:
        return self.file.read(self.length()).decode()

    def value(self, kind: int) -> Any:
        """A value; None for an array, which is passed over."""
        if kind == STRING:
            return self.string()
        if kind != ARRAY:
            return self.plain(PLAIN[kind])
        of, count = self.plain("I"), self.plain("Q")
        if of == STRING:
            for _ in range(count):
                self.skip(self.length())
        else:
            self.skip(count * struct.calcsize(f"<{PLAIN[of]}"))
        return None

    def tensor(self) -> tuple[str, tuple[int, ...]]:
        """A tensor's name and shape, whose first dimension is the last in the file."""
        name, dimensions = self.string(), self.plain("I")
        shape = struct.unpack(f"<{dimensions}Q", self.file.read(8 * dimensions))
        self.plain("I")  # how its numbers are stored
        if self.plain("Q") >= self.size:  # where they begin, behind the header
            raise ValueError("a tensor behind the file's end")
        return name, shape[::-1]

    def length(self) -> int:
        """The length of a string, which must lie in the file."""
        length = self.plain("Q")
        if length > self.size:
            raise ValueError("a string longer than the file")
        return length

    def skip(self, count: int) -> None:
        if self.file.tell() + count > self.size:
            raise ValueError("a value behind the file's end")
        self.file.seek(count, 1)
