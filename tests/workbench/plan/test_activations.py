"""Bytes per token against what real layers save for their backward pass, and a plan against a whole traced step."""

import importlib
import json
import math

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoConfig, AutoModelForCausalLM

from logitless.integrations.transformers.install import install
from logitless.models.catalog import from_config, shape_of
from logitless.models.instances import checkpoint_layers, with_adapters
from logitless.models.long_context import tile_mlp
from logitless.models.presets import preset
from logitless.workbench.plan.activations import activations, merged_experts
from logitless.workbench.plan.plan import plan
from logitless.workbench.plan.setting import Setting
from logitless.workbench.profile.step import Step, had_a_step, traced
from logitless.workbench.profile.step import build as build_step
from logitless.workbench.profile.trace import trace
from tests.support.allocations import AllocationTracker, trace_allocations

TOKENS = 64
SMALL = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": True,
    "use_cache": False,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 96}
FAMILIES = [
    {"model_type": "llama"},
    {"model_type": "mistral"},
    {"model_type": "qwen2"},
    {"model_type": "qwen3"},
    {"model_type": "gemma"},
    {"model_type": "gemma2", "attention": "eager"},
    {"model_type": "gemma3_text"},
    {"model_type": "smollm3"},
    {"model_type": "granite"},
    {"model_type": "qwen3_moe", **EXPERTS},
    {"model_type": "qwen2_moe", **EXPERTS, "shared_expert_intermediate_size": 128},
    {"model_type": "mixtral", "num_local_experts": 4, "intermediate_size": 96},
]


@pytest.fixture
def no_mask(monkeypatch):
    """Causal attention without a mask tensor, which these transformers build for traced inputs."""

    def apply(kind: str) -> None:
        name = kind.removesuffix("_text")
        module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
        for maker in ("create_causal_mask", "create_sliding_window_causal_mask"):
            if hasattr(module, maker):
                monkeypatch.setattr(module, maker, lambda *args, **kwargs: None)

    return apply


def build(config: dict, layers: int, lora: int = 0, attention: str = "sdpa"):
    fields = {**config, "num_hidden_layers": layers}
    full = AutoConfig.for_model(fields.pop("model_type"), **fields, attn_implementation=attention)
    model = AutoModelForCausalLM.from_config(full, dtype=torch.bfloat16)
    if lora:
        model = with_adapters(model, lora).get_base_model()
    return model.train()


def saved(model) -> int:
    """Bytes alive after the body's forward pass."""
    ids = torch.zeros(1, TOKENS, dtype=torch.int64)
    return trace_allocations(lambda: model.model(input_ids=ids).last_hidden_state).kept


@pytest.mark.filterwarnings("ignore:(The following|target_parameters=):RuntimeWarning")  # PEFT's own words on experts
@pytest.mark.parametrize("lora", [0, 4])
@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f["model_type"])
def test_a_layer_keeps_what_the_planner_says(family, lora, no_mask):
    config = {**SMALL, **family}
    attention = config.pop("attention", "sdpa")
    no_mask(config["model_type"])
    one, three = (saved(build(config, layers, lora, attention)) for layers in (1, 3))
    shape = from_config(config, "x")
    setting = Setting(shape, response_length=TOKENS, lora_rank=lora, attention=attention.replace("sdpa", "flash"))
    per = activations(shape, setting)
    layer = (three - one) / 2 - merged_experts(shape, setting)[0]
    assert math.isclose(layer / TOKENS, per.layer, rel_tol=0.02 if shape.moe_layers else 0.004)
    if not lora:  # beside the layers: the last norm, its output, the rotary tables
        assert math.isclose((one - (three - one) / 2) / TOKENS, per.last + per.tables, rel_tol=0.06)
    assert per.kept == shape.layers * per.layer


BACKWARDS = ("loss backward", "backward", "backward's end", "embedding")
LONG = {
    **SMALL,
    "model_type": "qwen3",
    "hidden_size": 256,
    "intermediate_size": 1024,
    "vocab_size": 8192,
}


@pytest.mark.halved
@pytest.mark.compiled  # fake tensors hold nothing to poison
@pytest.mark.parametrize("lora", [0, 8])
@pytest.mark.parametrize(("checkpointing", "tiles"), [(False, 1), (True, 1), (False, 3), (True, 3)])
@pytest.mark.parametrize(("kind", "attention"), [("qwen3", "sdpa"), ("llama", "sdpa"), ("gemma2", "eager")])
def test_a_plan_against_a_traced_step(kind, attention, checkpointing, tiles, lora, no_mask):
    """A whole forward, dense loss and backward of a model in bf16, traced without memory."""
    tokens, layers = 16_384, 2
    no_mask(kind)
    config = {**LONG, "model_type": kind}
    model = build(config, layers, lora, attention)
    weights = sum(p.nbytes for p in model.parameters())
    tile_mlp(model, tiles)
    if checkpointing:
        checkpoint_layers(model)
        if lora:
            model.enable_input_require_grads()
    with FakeTensorMode(allow_non_fake_inputs=True) as fake, AllocationTracker() as tracker:
        for module in model.modules():
            for name, p in module.named_parameters(recurse=False):
                setattr(module, name, torch.nn.Parameter(fake.from_tensor(p.detach()), requires_grad=p.requires_grad))
        before = tracker.peak = tracker.live
        ids = torch.zeros(1, tokens, dtype=torch.int64)
        hidden = model.model(input_ids=ids).last_hidden_state
        logits = model.lm_head(hidden)
        if softcap := getattr(model.config, "final_logit_softcapping", None):
            logits = torch.tanh(logits / softcap) * softcap
        loss = model.loss_function(logits, ids, vocab_size=8192)
        del logits  # as Trainer does
        forward, tracker.peak = tracker.peak - before, tracker.live
        loss.backward()
        backward = tracker.peak - before
    shape = from_config({**config, "num_hidden_layers": layers}, "x")
    setting = Setting(
        shape,
        batch_size=1,
        response_length=tokens,
        gradient_checkpointing=checkpointing,
        mlp_tiles=tiles,
        lora_rank=lora,
        attention=attention.replace("sdpa", "flash"),
        optimizer="none",
    )
    planned = plan(setting, "dense").peaks
    assert math.isclose(max(planned["forward"], planned["loss"]) - weights, forward, rel_tol=0.02)
    assert math.isclose(max(planned[p] for p in BACKWARDS) - weights, backward, rel_tol=0.02)


@pytest.mark.parametrize(
    ("prompt", "response", "rows", "close"),
    [
        (8, 16, ("key-value cache", "next token's logits"), 0.01),
        (128, 2, ("key-value cache", "prompts in a layer"), 0.12),
    ],
)
def test_a_rollout_against_a_real_generation(prompt, response, rows, close):
    """Sampled as TRL's trainers do: short prompts take most at a token's draw, long ones in their own pass."""
    n, config = 8, {**LONG, "eos_token_id": None, "use_cache": True}
    model = build(config, 2).eval()
    ids = torch.randint(3, 96, (n, prompt))
    given = {"attention_mask": torch.ones_like(ids), "max_new_tokens": response, "do_sample": True, "top_k": None}
    measured = trace_allocations(lambda: model.generate(ids, **given)).peak
    shape = from_config({**config, "num_hidden_layers": 2}, "x")
    same = {"prompt_length": prompt, "response_length": response, "optimizer": "none"}
    found = {c.name: c for c in plan(Setting(shape, "reinforce", batch_size=n, **same)).components}
    assert math.isclose(sum(found[name].nbytes for name in rows), measured, rel_tol=close)
    assert {found[name].phases for name in rows} == {("rollout",)}
    assert found["next token's logits"].largest == n * 8192 * 4


@pytest.mark.compiled
@pytest.mark.parametrize(("checkpointing", "more"), [pytest.param(False, 1.13, marks=pytest.mark.slow), (True, 1.04)])
def test_float32_weights_under_autocast_take_little_more_than_master_weights(checkpointing, more, tmp_path):
    """As the page of plan says of `train --mixed-precision bf16`; traced as on a CPU, which torch knows autocast of."""
    tokens, path = 4096, tmp_path / "config.json"
    sizes = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 6, "head_dim": 64}
    path.write_text(json.dumps({**LONG, **sizes, "model_type": "qwen2", "num_attention_heads": 8}))
    model = build_step(Step(str(path), tokens, dtype="float32", gradient_checkpointing=checkpointing))
    with trace(model, device="cpu", batch=(1, tokens)) as t:
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        had_a_step(optimizer)
        install(model, memory_budget=1 << 20)
        ids = torch.zeros(1, tokens, dtype=torch.int64)
        with torch.autocast("cpu", torch.bfloat16):  # as Trainer has it, around the forward pass
            loss = model(input_ids=ids, labels=ids.clone(), use_cache=False).loss
        loss.backward()
        optimizer.step()
    same = {"gradient_checkpointing": checkpointing, "memory_budget": 1 << 20}
    planned = plan(Setting(shape_of(str(path)), batch_size=1, response_length=tokens, **same))
    assert t.peak.nbytes / planned.peak == pytest.approx(more, abs=0.02)


@pytest.mark.filterwarnings("ignore:(The following|target_parameters=):RuntimeWarning")
@pytest.mark.parametrize("checkpointing", [False, True])
def test_adapted_experts_against_a_real_step(checkpointing, no_mask):
    """PEFT folds the adapters into a copy of all experts, which outweighs the activations of a short sequence."""
    tokens, layers, rank = 512, 4, 8
    no_mask("qwen3_moe")
    config = {**SMALL, "model_type": "qwen3_moe", **EXPERTS, "num_experts": 32}
    model = build(config, layers, rank)
    if checkpointing:
        checkpoint_layers(model)
        model.enable_input_require_grads()
    ids = torch.zeros(1, tokens, dtype=torch.int64)
    forward = trace_allocations(lambda: model.model(input_ids=ids).last_hidden_state)
    backward = trace_allocations(forward.result.float().sum().backward)
    setting = Setting(
        from_config({**config, "num_hidden_layers": layers}, "x"),
        batch_size=1,
        response_length=tokens,
        lora_rank=rank,
        gradient_checkpointing=checkpointing,
        optimizer="none",
    )
    made = plan(setting)
    weights = sum(c.nbytes for c in made.components if c.name in ("parameters", "adapters"))
    planned = max(made.peaks[p] for p in BACKWARDS) - weights
    assert 0.85 < planned / (forward.kept + backward.peak) < 1.35
    if not checkpointing:
        kept = {c.name: c.nbytes for c in made.components}
        most = kept["experts with their adapters"]
        assert most > 0.3 * forward.kept
        assert math.isclose(most + kept["activations of the layers"], forward.kept, rel_tol=0.03)


@pytest.mark.compiled
@pytest.mark.parametrize(
    ("family", "options"),
    [
        ({"model_type": "llama"}, {}),
        ({"model_type": "llama"}, {"mlp_tiles": 4}),
        ({"model_type": "llama"}, {"lora_rank": 4}),
        ({"model_type": "llama"}, {"attention": "eager"}),
        ({"model_type": "llama"}, {"attention": "eager", "gradient_checkpointing": True}),
        ({"model_type": "mixtral", "num_local_experts": 4}, {}),
        ({"model_type": "qwen3_moe", **EXPERTS, "moe_intermediate_size": 16}, {}),
        ({"model_type": "qwen2_moe", **EXPERTS, "shared_expert_intermediate_size": 512}, {"lora_rank": 4}),
    ],
)
def test_the_largest_tensor_of_a_layer(family, options, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**SMALL, **family, "tie_word_embeddings": False}))
    step = Step(str(path), context_length=256, **{"attention": "sdpa", **options})
    made = [a for a in traced(step).allocations if a.module.startswith("model.layers.") and a.category == "activations"]
    setting = Setting(shape_of(str(path)), batch_size=1, response_length=256, **options)
    layer = "a layer, recomputed" if setting.gradient_checkpointing else "activations of the layers"
    planned = next(c for c in plan(setting).components if c.name == layer)
    assert planned.largest == max(a.nbytes for a in made)


@pytest.mark.compiled
@pytest.mark.parametrize("lora", [0, pytest.param(16, marks=pytest.mark.slow)])
def test_a_plan_against_a_traced_step_with_offloaded_inputs(lora, tmp_path):
    """A few layers of a 0.6B shape, whose inputs leave the GPU however many there are."""
    light = {"gradient_checkpointing": True, "offload_activations": True, "mlp_tiles": 8, "lora_rank": lora}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(preset("qwen3-0.6b") | {"num_hidden_layers": 4, "vocab_size": 32_000}))
    step = Step(str(path), context_length=32768, attention="sdpa", optimizer="none", **light)
    setting = Setting(shape_of(str(path)), batch_size=1, response_length=32768, optimizer="none", **light)
    assert math.isclose(plan(setting).peak, traced(step).peak.nbytes, rel_tol=0.02)


@pytest.mark.compiled
@pytest.mark.parametrize(
    ("light", "lora", "tokens"),
    [
        pytest.param({"gradient_checkpointing": True}, 0, 2048, marks=pytest.mark.slow),
        ({}, 0, 2048),
        # what tiles leave is no more than a chunk of queries takes, unless there are many tokens
        pytest.param({"gradient_checkpointing": True, "mlp_tiles": 8}, 0, 8192, marks=pytest.mark.slow),
        pytest.param({"gradient_checkpointing": True}, 8, 2048, marks=pytest.mark.slow),
        pytest.param({}, 8, 2048, marks=pytest.mark.slow),
    ],
    ids=lambda x: "-".join(x) or "kept" if isinstance(x, dict) else str(x),
)
def test_a_plan_against_a_traced_step_with_sparse_attention(light, lora, tokens, tmp_path, monkeypatch):
    monkeypatch.setattr("logitless.models.nsa.attention.CHUNK_BYTES", 4 << 20)  # small as this model is
    path = tmp_path / "config.json"
    fields = {**LONG, "vocab_size": 256, "num_hidden_layers": 2}
    path.write_text(json.dumps(fields))
    same = {"optimizer": "none", "attention": "nsa", "lora_rank": lora, "memory_budget": 1 << 22, **light}
    found = traced(Step(str(path), context_length=tokens, **same)).peak.nbytes
    setting = Setting(shape_of(str(path)), batch_size=1, response_length=tokens, **same)
    assert math.isclose(plan(setting).peak, found, rel_tol=0.02)
