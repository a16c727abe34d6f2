"""Intuitor's known failure, a policy that grows sure by saying one thing again, and the guard against it."""

import shutil
from dataclasses import replace

import pytest
import torch
from rich.console import Console

from logitless.workbench.align.config import AlignConfig
from logitless.workbench.align.rewards import rewards_of
from logitless.workbench.align.run import run
from logitless.workbench.common.files import read_lines
from tests.support.workbench.micro import line_corpus, micro_model

SURE = 77  # the token that is surest of being followed by itself


def repeating():
    """Every token expects itself next: all layers are 0, and the head is the embedding, far from 0."""
    model = micro_model()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.get_input_embeddings().weight.mul_(11)
        model.get_input_embeddings().weight[SURE].mul_(1.5)
    return model.eval()


def test_the_reward_of_a_collapsed_completion():
    """It is the surest, and the worst rewarded: its tokens occurred before."""
    (certainty, weight), (guard, guard_weight) = rewards_of(AlignConfig())
    certainty.bind(repeating())
    completions = [[SURE] * 12, [SURE] * 11 + [5], list(range(20, 32)), list(range(40, 52))]
    sure = certainty(prompt_token_ids=[[3, 4, 5]] * 4, completion_ids=completions)
    total = [weight * s + guard_weight * g for s, g in zip(sure, guard(completion_ids=completions), strict=True)]
    assert min(sure[:2]) > max(sure[2:]) + 0.5
    assert max(total[:2]) < min(total[2:]) - 0.5


@pytest.mark.slow
def test_a_run_that_would_collapse(micro, tmp_path):
    """From one policy that repeats itself: on self-certainty alone it does so more, with the default guard less."""
    model = tmp_path / "model"
    shutil.copytree(micro.model.parent, model)
    repeating().save_pretrained(model)
    config = AlignConfig(
        model=str(model),
        data=str(line_corpus(tmp_path / "data")),
        prompt_length=24,
        completion_length=16,
        batch_size=16,
        max_steps=32,
        learning_rate=2e-2,
        beta=0.0,
        device="cpu",
    )
    repeated = {}
    for name, options in {"guarded": {}, "free": {"repetition_guard": 0.0, "rewards": "repetition_guard=0"}}.items():
        run(replace(config, output_dir=tmp_path / name, **options), Console(quiet=True))
        records = [record for record in read_lines(tmp_path / name / "metrics.jsonl") if "loss" in record]
        repeated[name] = [-record["rewards/repetition_guard/mean"] for record in records]
    begin, free, guarded = repeated["free"][0], *(sum(repeated[name][-4:]) / 4 for name in ("free", "guarded"))
    assert guarded < begin - 0.1
    assert free > begin + 0.1
