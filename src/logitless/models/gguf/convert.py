"""The model of a GGUF file as a transformers directory."""

from __future__ import annotations

import io
import json
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

from ...errors import ConfigError, in_one_line
from ...printable import few
from ...versions import installing
from .config import complete
from .header import ELSEWHERE, Header, check_numbers, read_header
from .positions import rope_parameters

UNKNOWN = ("not supported", "Unrecognized configuration", "Cannot build a tokenizer")  # of transformers' errors


def convert(path: Path, folder: Path) -> None:
    """Writes the model of a GGUF file, its weights in float32, its tokenizer and chat template, as transformers has it.

    Raises ConfigError for a file that transformers cannot read, and what writing raises.
    """
    from importlib.util import find_spec

    header = read_header(path)
    if find_spec("gguf") is None:
        raise ConfigError(f"--model {path}: a GGUF file needs the package gguf: {installing('train')}")
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    there = {"gguf_file": path.name, "trust_remote_code": False}
    try:
        with redirect_stderr(io.StringIO()):  # a bar of tqdm's own
            config: Any = AutoConfig.from_pretrained(path.parent, **there)
            complete(config, header)
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                path.parent,
                config=config,
                dtype=torch.float32,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # which are found below
                **there,
            )
            tokenizer: Any = AutoTokenizer.from_pretrained(path.parent, **there)
    except Exception as error:  # each reader of transformers and gguf fails in its own way
        why = in_one_line(error)
        if not isinstance(error, NotImplementedError) and not any(sign in why for sign in UNKNOWN):
            why = f"this GGUF file cannot be read, most likely damaged or cut short ({why}); get it anew"
        raise ConfigError(f"--model {path}: {why}") from None
    model, found = loaded
    _check_whole(path, header, model, found)
    if getattr(model.config, "rope_parameters", None):  # not of every architecture
        model.config.rope_parameters = rope_parameters(path, header, model.config)
    # transformers takes a model from GGUF for a quantised one, which it saves only as it was; these weights are plain.
    model.hf_quantizer = None
    vars(model.config).pop("quantization_config", None)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    _drop_unknown(folder / "tokenizer.json", model.get_input_embeddings().num_embeddings)


def _check_whole(path: Path, header: Header, model: Any, found: dict[str, Any]) -> None:
    """ConfigError where weights would be random, or numbers of the file left out."""
    missing, mismatched = sorted(found["missing_keys"]), sorted(found["mismatched_keys"])
    if mismatched:
        name, there, expected = mismatched[0]
        raise ConfigError(
            f"--model {path}: this GGUF file is damaged: {name} has shape {tuple(there)}, where its header says "
            f"{tuple(expected)}; get it anew"
        )
    if missing:
        raise ConfigError(f"--model {path}: this GGUF file lacks {few(missing)}; get it anew, or {ELSEWHERE}")
    check_numbers(path, header, sum(p.numel() for p in model.parameters()))


def _drop_unknown(path: Path, rows: int) -> None:
    """Takes GPT-2's end of text, which transformers adds, out of a tokenizer that has another: it has no row."""
    tokenizer = json.loads(path.read_text(encoding="utf-8"))
    tokenizer["added_tokens"] = [token for token in tokenizer["added_tokens"] if token["id"] < rows]
    path.write_text(json.dumps(tokenizer, ensure_ascii=False), encoding="utf-8")
