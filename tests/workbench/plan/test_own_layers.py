"""Families outside of the catalogue: their plans against traces of the whole step, and what is said of them."""

import json
import math
from dataclasses import replace

import pytest

from logitless.cli.plan import PlanConfig
from logitless.models.catalog import shape_of
from logitless.models.shapes import Traced
from logitless.units import format_bytes
from logitless.workbench.plan.own_layers import as_traced
from logitless.workbench.plan.plan import plan
from logitless.workbench.plan.report import notes
from logitless.workbench.plan.setting import Setting
from logitless.workbench.profile.step import Step, traced

pytestmark = pytest.mark.compiled  # fake tensors hold nothing to poison

SIZES = {
    "vocab_size": 1000, "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 6, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 32, "pad_token_id": 0, "tie_word_embeddings": False,
}  # fmt: skip
LATENT = {
    "num_key_value_heads": 8, "q_lora_rank": 96, "kv_lora_rank": 64, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32,
    "v_head_dim": 32,
}  # fmt: skip
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 128}
DEEPSEEK = {
    **SIZES, "head_dim": 16, **LATENT, **EXPERTS, "n_routed_experts": 8, "n_shared_experts": 1, "n_group": 2,
    "topk_group": 1, "first_k_dense_replace": 2,
}  # fmt: skip
LINEAR = {
    "linear_num_value_heads": 8, "linear_num_key_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
}  # fmt: skip
FAMILIES = {
    "deepseek_v3": DEEPSEEK,
    "glm4_moe_lite": DEEPSEEK,
    "llama4_text": {**SIZES, **EXPERTS, "intermediate_size_mlp": 768, "num_local_experts": 4, "num_experts_per_tok": 1},
    "phimoe": {**SIZES, "num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 128},
    "gpt_oss": {**SIZES, "num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 128},
    "starcoder2": SIZES,
    "phi3": SIZES,  # whose parameters are as many as a Llama's
    "lfm2": {**SIZES, "full_attn_idxs": [2, 5], "conv_bias": False},
    "qwen3_5_text": {**SIZES, **LINEAR, "layer_types": ["full_attention", *5 * ["linear_attention"]]},
}


def saved(tmp_path, kind: str, **more) -> str:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": kind, **FAMILIES.get(kind, SIZES), **more}))
    return str(path)


def held(path: str, tokens: int, **same) -> None:
    """A plan's peaks, over all and at the loss, to those of a trace; with checkpointing masks decide the second."""
    same = {"optimizer": "none", "memory_budget": 1 << 20, **same}
    found = traced(Step(path, tokens, **same))
    shape = PlanConfig(model=path, lora_rank=same.get("lora_rank", 0)).setting().model
    assert shape.traced.kept
    planned = plan(Setting(shape, batch_size=1, response_length=tokens, **same))
    at_loss = {stage.name: stage.peak for stage in found.stages}["loss"]
    assert math.isclose(planned.peak, found.peak.nbytes, rel_tol=0.1)
    assert math.isclose(planned.peaks["loss"], at_loss, rel_tol=0.1) or "gradient_checkpointing" in same


SOON = ("deepseek_v3", "gpt_oss")


@pytest.mark.parametrize("kind", [k if k in SOON else pytest.param(k, marks=pytest.mark.slow) for k in FAMILIES])
def test_a_plan_against_a_traced_step(kind, tmp_path):
    tokens = 2048 if kind == "qwen3_5_text" else 4096  # a trace runs each step of a scan
    held(saved(tmp_path, kind), tokens)


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=pytest.mark.slow) for kind in FAMILIES])
def test_a_plan_with_checkpointing_against_a_traced_step(kind, tmp_path):
    held(saved(tmp_path, kind), 2048, gradient_checkpointing=True)


@pytest.mark.parametrize("kind", ["starcoder2", pytest.param("deepseek_v3", marks=pytest.mark.slow)])
def test_adapters_are_traced_too(kind, tmp_path):
    held(saved(tmp_path, kind), 4096, lora_rank=8)


def test_scores_of_short_sequences_are_few(tmp_path):
    path = saved(tmp_path, "gpt_oss")
    planned = plan(Setting(as_traced(shape_of(path)), batch_size=64, response_length=64, optimizer="none"))
    assert min(component.nbytes for component in planned.components) > 0
    found = traced(Step(path, 64, 64, optimizer="none"))
    assert math.isclose(planned.peak, found.peak.nbytes, rel_tol=0.15)


@pytest.mark.slow
def test_scores_come_on_top(tmp_path):
    held(saved(tmp_path, "starcoder2"), 2048, attention="eager")


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("starcoder2", "activations as traced of its own layers"),
        ("phi3", "activations as traced of its own layers"),
        ("gpt_oss", "of its own layers, whose attention makes scores whole unless a kernel is installed"),
    ],
)
def test_where_activations_come_from_is_said(kind, said, tmp_path):
    (note,) = notes(PlanConfig(model=saved(tmp_path, kind)).setting())
    assert "parameters counted by transformers; activations as traced" in note
    assert note.endswith(said)


def test_what_kernels_for_a_state_would_leave_is_said_too(tmp_path):
    shape = as_traced(shape_of(saved(tmp_path, "qwen3_5_text")))
    setting = Setting(shape, response_length=2048)
    (note,) = notes(setting)
    assert "which carry a state, without kernels for it (fla, mamba-ssm); these keep far less" in note
    alike = plan(replace(setting, model=replace(shape, traced=Traced()))).peak
    assert note.endswith(f"of a Llama's layers of its sizes, logitless would take {format_bytes(alike)}")
    assert alike < plan(setting).peak / 2
    assert notes(setting, "GB")[0].endswith(f"would take {format_bytes(alike, 'GB')}")


def test_layers_whose_work_depends_on_their_data_are_as_a_mixtrals(tmp_path):
    more = {"zero_expert_num": 2, "moe_topk": 2, "expert_ffn_hidden_size": 128, "ffn_hidden_size": 256, "num_layers": 2}
    path = saved(tmp_path, "longcat_flash", **{**DEEPSEEK, **more})
    shape = as_traced(shape_of(path))
    assert shape == shape_of(path)
    (note,) = notes(Setting(shape))
    assert "its layers cannot be traced, so activations as of a Mixtral's" in note
