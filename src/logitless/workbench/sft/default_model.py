"""The models of `logitless align` without --model, and how they come about."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from ..common.files import write_whole
from ..common.options import DEFAULT_MODEL, SMALL_MODEL
from ..common.written import RUN_FILE, START
from ..runs.rundir import stored
from ..sources.corpus import documents
from ..sources.tokenizer import byte_pairs
from .config import TrainConfig

SMALL_VOCAB = 2048
SMALL = {
    "model_type": "qwen3",
    "vocab_size": SMALL_VOCAB,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}


def default_model(model: str, device: str, console: Console) -> None:
    """Trains the model of this name, where it is a default one and nobody has trained it yet."""
    if model not in (DEFAULT_MODEL, SMALL_MODEL) or Path(model, "config.json").exists():
        return
    import torch.distributed as dist  # here: who has a model needs no trainer
    from accelerate import PartialState

    from ..common.say import say
    from .run import run as train_text

    place = Path(model).parent
    minutes = "2.5 minutes" if model == DEFAULT_MODEL else "1.5 minutes"
    if not dist.is_initialized() or dist.get_rank() == 0:
        say(console, f"no model at {model} yet: training it first (logitless train), {minutes} ...")
    if (place / RUN_FILE).exists():
        options = replace(stored(place, TrainConfig()), resume=place)
    elif model == DEFAULT_MODEL:
        options = TrainConfig(output_dir=place)
    else:
        start = str(_start(place) / "config.json")
        sizes = {"context_length": 96, "batch_size": 24, "max_steps": 320, "learning_rate": 5e-3}
        options = TrainConfig(model=start, output_dir=place, **sizes)
    train_text(replace(options, device=device), console)
    PartialState().wait_for_everyone()


def _start(place: Path) -> Path:
    """start/: the small model's configuration, and a tokenizer of the standard library's own byte pairs."""
    from ..sources.packing import HELD_OUT_EVERY

    texts = [text for i, text in enumerate(documents(None)[0]) if i % (HELD_OUT_EVERY // 2) == 1]  # none is held out

    def write(path: Path) -> None:
        byte_pairs(texts, SMALL_VOCAB).save_pretrained(path)
        (path / "config.json").write_text(json.dumps(SMALL), encoding="utf-8")

    place.mkdir(parents=True, exist_ok=True)
    write_whole(place / START, write)
    return place / START
