"""Two micro models of one tokenizer, and options that evaluate them."""

from pathlib import Path

import pytest
import torch
from transformers import PhiConfig, PhiForCausalLM, Qwen3ForCausalLM

from logitless.workbench.evaluation.config import EvalConfig
from tests.support.workbench.micro import SHAPE, micro_directory, micro_model
from tests.workbench.scoring.conftest import small_blocks

__all__ = ["small_blocks"]


LETTERS = slice(67, 93)  # the ids of a to z


def lettered() -> Qwen3ForCausalLM:
    """A Qwen3 over bytes that expects letters, and is sure of some of them."""
    model = micro_model(initializer_range=0.2)
    with torch.no_grad():
        model.model.embed_tokens.weight[LETTERS] *= 3
    return model


def drawn(model: Qwen3ForCausalLM, length: int, seed: int) -> str:
    """Letters as the model itself would go on, so that it is often right."""
    noise, ids = torch.Generator().manual_seed(seed), [LETTERS.start + seed % 26]
    for _ in range(length - 1):
        with torch.no_grad():
            p = model(torch.tensor([ids])).logits[0, -1, LETTERS].softmax(-1)
        ids.append(LETTERS.start + int(torch.multinomial(p, 1, generator=noise)))
    return "".join(chr(97 + i - LETTERS.start) for i in ids)


@pytest.fixture(scope="session")
def micro(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("evaluated") / "model"
    micro_directory(place)
    lettered().save_pretrained(place)
    return place


@pytest.fixture(scope="session")
def near(micro, tmp_path_factory) -> Path:
    """The same model with rounded weights."""
    place = tmp_path_factory.mktemp("rounded") / "model"
    micro_directory(place)
    model = lettered()
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16).float()
    model.save_pretrained(place)
    return place


def biased(place: Path, bias: float) -> Path:
    """A model with a bias of z, and of nothing else: -inf takes it away."""
    place.mkdir()
    micro_directory(place)
    torch.manual_seed(0)
    shape = {name: x for name, x in SHAPE.items() if name not in ("head_dim", "tie_word_embeddings")}
    model = PhiForCausalLM(PhiConfig(**shape))
    model.lm_head.bias.data[LETTERS.start + 25] = bias
    model.save_pretrained(place)
    return place


def options(micro: Path, data: Path, out: Path, **more: object) -> EvalConfig:
    given = {"device": "cpu", "batch_tokens": 256, **more}
    return EvalConfig(model=str(micro), data=str(data), out=out, **given)
