"""A policy, a reward and options of runs of seconds."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import Qwen3ForSequenceClassification

from logitless.workbench.grade.config import GradeConfig
from tests.support.workbench.micro import line_corpus, micro_directory, micro_model


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> SimpleNamespace:
    """config: a run of seconds; reward: a classifier that likes some letters, of the policy's vocabulary."""
    root: Path = tmp_path_factory.mktemp("grade")
    model, reward = root / "model", root / "reward"
    micro_directory(model)
    micro_model(initializer_range=0.2).save_pretrained(model)
    shutil.copytree(model, reward, ignore=shutil.ignore_patterns("*.safetensors"))
    torch.manual_seed(3)
    config = micro_model().config
    config.num_labels, config.initializer_range, config.pad_token_id = 2, 0.3, 0
    Qwen3ForSequenceClassification(config).save_pretrained(reward)
    config = GradeConfig(
        model=str(model),
        reward_model=str(reward),
        data=str(line_corpus(root / "data")),
        prompt_length=12,
        completion_length=5,
        batch_size=4,
        gradient_accumulation_steps=2,
        max_steps=4,
        learning_rate=3e-2,
        beta=0.01,
        top_k=40,
        evaluation_prompts=8,
        variance_samples=0,
        lora_rank=4,
        device="cpu",
        output_dir=root / "run",
    )
    return SimpleNamespace(config=config, reward=reward, model=model, root=root)
