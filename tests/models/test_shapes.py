"""Model shapes against transformers' own models, built on the meta device: no weight exists."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from logitless.errors import ConfigError
from logitless.models.catalog import ALIASES, CONFIGS, FAMILIES, REQUIRED, from_config, shape_of
from logitless.models.instances import with_adapters
from logitless.models.nsa.layers import attach
from logitless.models.on_meta import shape_on_meta

# The meta device knows torch.empty by identity: a poisoned one would allocate gigabytes.
pytestmark = pytest.mark.compiled

SMALL = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
VARIANTS = [
    *({"model_type": kind} for kind in FAMILIES if "moe" not in kind and kind != "mixtral"),
    {"model_type": "llama", "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    {"model_type": "llama", "num_key_value_heads": None},
    {"model_type": "qwen3", "attention_bias": True, "tie_word_embeddings": False},
    {"model_type": "mixtral", "num_local_experts": 4},
    {"model_type": "mixtral", "num_experts": 4},
    {"model_type": "mixtral", "num_experts": 3, "num_local_experts": 4},  # which counts differs between families
    {"model_type": "qwen3_moe", **EXPERTS, "num_local_experts": 3},
    {"model_type": "qwen2_moe", **EXPERTS, "shared_expert_intermediate_size": 40, "num_local_experts": 3},
    {"model_type": "qwen3_moe", **EXPERTS},
    {"model_type": "qwen3_moe", **EXPERTS, "decoder_sparse_step": 2, "mlp_only_layers": [0, 1]},
    {"model_type": "qwen2_moe", **EXPERTS, "shared_expert_intermediate_size": 40, "mlp_only_layers": [0]},
]


LEAST = {  # of what a configuration says; divided by any family's own number of key-value heads
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 32,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def instantiated(config: dict) -> int:
    """Parameters of transformers' model."""
    fields = {k: v for k, v in config.items() if k not in ("model_type", "architectures")}
    if not fields.get("sliding_window"):
        fields.pop("sliding_window", None)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(config["model_type"], **fields))
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("name", CONFIGS)
def test_presets_have_exactly_transformers_parameters(name):
    assert shape_of(name).parameters == instantiated(CONFIGS[name])


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: "-".join(f"{x}" for x in v.values()))
def test_any_configuration_has_exactly_transformers_parameters(variant):
    config = {k: v for k, v in {**SMALL, **variant}.items() if v is not None}
    tied = config.setdefault(
        "tie_word_embeddings", FAMILIES[config["model_type"]].defaults.get("tie_word_embeddings", False)
    )
    shape = from_config(config, "x")
    assert shape.tied == tied
    assert shape.parameters == instantiated(config)


@pytest.mark.parametrize("kind", FAMILIES)
def test_what_a_configuration_leaves_out_is_what_transformers_takes(kind):
    shape, config = from_config({**LEAST, "model_type": kind}, "x"), AutoConfig.for_model(kind, **LEAST)
    assert shape.parameters == instantiated({**LEAST, "model_type": kind})
    assert shape.kv_heads == config.num_key_value_heads
    assert shape.active_experts == (getattr(config, "num_experts_per_tok", None) or 0)
    assert shape.window == (getattr(config, "sliding_window", None) or 0)


WIDE = {"model_type": "qwen3_moe", **EXPERTS, "intermediate_size": 512}  # of a dense MLP that no layer has


@pytest.mark.parametrize("variant", [*VARIANTS, WIDE], ids=lambda v: "-".join(f"{x}" for x in v.values()))
def test_the_largest_layer_its_last_matrix_and_vectors_are_transformers(variant):
    config = {k: v for k, v in {**SMALL, **variant}.items() if v is not None}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    shape = from_config(config, "x")
    assert shape.largest_layer == max(sum(p.numel() for p in layer.parameters()) for layer in model.model.layers)
    last = ("mlp.down_proj.weight", "experts.down_proj")
    assert shape.last_matrix == max(p.numel() for name, p in model.named_parameters() if name.endswith(last))
    if not shape.mlp_bias:
        assert shape.vectors == sum(p.numel() for p in model.parameters() if p.dim() == 1)


@pytest.mark.parametrize(
    ("name", "parameters"),  # as their authors publish them
    [
        ("qwen2.5-0.5b", 494_032_768),
        ("qwen2.5-1.5b", 1_543_714_304),
        ("qwen2.5-7b", 7_615_616_512),
        ("4b", 4_022_468_096),
        ("llama-3.2-1b", 1_235_814_400),
        ("llama-3-8b", 8_030_261_248),
        ("gemma-2-2b", 2_614_341_888),
        ("gemma-3-1b", 999_885_952),
        ("mistral-7b", 7_248_023_552),
    ],
)
def test_published_counts(name, parameters):
    assert shape_of(name).parameters == parameters


def test_llama_3_reaches_less_far_than_3_1():
    assert (shape_of("llama-3-8b").name, shape_of("llama-3-8b").positions) == ("llama-3-8b", 8192)
    assert shape_of("llama-3.1-8b").positions == 131_072


def test_experts_that_a_family_does_not_have():
    """Configurations that were converted name some, which transformers' class never reads."""
    stray = {**SMALL, "model_type": "llama", "num_local_experts": 8, "num_experts_per_tok": 2}
    assert from_config(stray, "x") == from_config({**SMALL, "model_type": "llama"}, "x")


def test_4b_is_qwen3_4b():
    shape = shape_of("4b")
    assert ALIASES["4b"] == shape.name == "qwen3-4b"
    assert (shape.vocab, shape.tied, shape.layers) == (151_936, True, 36)


def test_windows_shorten_the_cache():
    gemma = shape_of("gemma-2-2b")
    assert (gemma.window, gemma.windowed_layers) == (4096, 13)
    assert gemma.kv_tokens(8192) == 13 * 8192 + 13 * 4096
    assert gemma.kv_tokens(100) == 26 * 100
    assert shape_of("gemma-3-1b").windowed_layers == 26 - 4
    assert shape_of("llama-3.2-1b").kv_tokens(8192) == 16 * 8192
    listed = {**SMALL, "model_type": "gemma2", "layer_types": ["sliding_attention", "full_attention", "full_attention"]}
    assert from_config(listed, "x").windowed_layers == 1
    assert from_config({**SMALL, "model_type": "llama", "sliding_window": 8}, "x").window == 0  # Llama reads none


def test_softcaps():
    assert shape_of("gemma-2-2b").softcap
    assert not shape_of("gemma-3-1b").softcap
    assert not shape_of("qwen3-4b").softcap
    without = {**SMALL, "model_type": "gemma2", "final_logit_softcapping": None, "attn_logit_softcapping": None}
    assert not from_config(without, "x").softcap
    assert not from_config(without, "x").attention_softcap


def test_the_text_part_of_a_multimodal_configuration():
    text = {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10_240, "num_hidden_layers": 34}
    shape = from_config({"model_type": "gemma3", "vision_config": {}, "text_config": text}, "x")
    assert shape.parameters == shape_of("gemma-3-4b").parameters


@pytest.mark.filterwarnings("ignore:(The following|target_parameters=):RuntimeWarning")  # PEFT's own words on experts
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: "-".join(map(str, v.values())))
def test_adapters_have_exactly_pefts_parameters(variant):
    config = {k: v for k, v in {**SMALL, **variant}.items() if v is not None}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=torch.bfloat16)
        adapted = [p for p in with_adapters(model, 4).parameters() if p.requires_grad]
    assert from_config(config, "x").lora(4) == sum(p.numel() for p in adapted)
    assert {p.dtype for p in adapted} == {torch.float32}


def test_adapters_on_the_layers_of_gpt2_are_made_without_a_word():
    """Here a warning is an error: PEFT's is of an option that it then sets itself."""
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt2", n_embd=32, n_layer=1, n_head=2))
    adapted = [name for name, p in with_adapters(model, 2).named_parameters() if p.requires_grad]
    assert any("c_attn.lora_A" in name for name in adapted)


def test_a_family_outside_of_the_catalogue_is_counted_by_transformers(tmp_path):
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 512}
    config = {"model_type": "gpt_neox", **sizes, "intermediate_size": 96}
    (tmp_path / "config.json").write_text(json.dumps(config))
    shape = shape_of(str(tmp_path))
    assert shape.uncounted
    assert (shape.layers, shape.hidden, shape.mlp, shape.vocab) == (2, 64, 96, 512)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    assert shape.parameters == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("kind", ["gpt_neox", "gpt_oss", "olmo2"])
def test_the_largest_layer_of_a_family_outside_of_the_catalogue(kind):
    config = {**SMALL, "model_type": kind, "num_local_experts": 8, "num_experts_per_tok": 2}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    layers = max((m for m in model.modules() if isinstance(m, torch.nn.ModuleList)), key=len)
    real = max(sum(p.numel() for p in layer.parameters()) for layer in layers)
    shape = from_config(config, "x")
    assert shape.uncounted
    assert shape.largest_layer == pytest.approx(real, rel=0.01)


def test_softcaps_and_states_of_a_family_outside_of_the_catalogue():
    capped = {**SMALL, "model_type": "vaultgemma", "final_logit_softcapping": 30.0, "attn_logit_softcapping": None}
    shape = from_config(capped, "x")
    assert (shape.softcap, shape.attention_softcap, shape.stateful) == (True, False, False)
    shape = from_config({**capped, "final_logit_softcapping": None, "attn_logit_softcapping": 50.0}, "x")
    assert (shape.softcap, shape.attention_softcap) == (False, True)
    assert from_config({**SMALL, "model_type": "jamba"}, "x").stateful


def test_layers_that_differ_are_counted_too():
    """Gemma 4's heads have two sizes; transformers refuses to say one for the model."""
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 6, "vocab_size": 512}
    config = {"model_type": "gemma4_text", **sizes, "num_key_value_heads": 2, "head_dim": 16, "global_head_dim": 32}
    shape = from_config(config, "x")
    assert (shape.head_dim, shape.kv_heads) == (16, 2)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    assert shape.parameters == sum(p.numel() for p in model.parameters())


def test_layers_whose_mlps_differ_are_as_wide_as_the_widest():
    """Gemma 3n's intermediate_size is a list, of which a layer's memory cannot be computed."""
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 512, "head_dim": 16}
    sizes |= {"vocab_size_per_layer_input": 512, "hidden_size_per_layer_input": 8, "laurel_rank": 4}
    more = {"activation_sparsity_pattern": [0.0, 0.0], "num_kv_shared_layers": 0}
    config = {"model_type": "gemma3n_text", **sizes, **more, "intermediate_size": [96, 48]}
    shape = from_config(config, "x")
    assert shape.mlp == 96
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    assert shape.parameters == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    ("fields", "width"),
    [
        ({"model_type": "opt", "ffn_dim": 96, "word_embed_proj_dim": 32}, 96),
        ({"model_type": "ctrl", "dff": 80}, 80),
        ({"model_type": "gpt2", "n_inner": 72}, 72),
        ({"model_type": "falcon", "ffn_hidden_size": 64}, 64),
        ({"model_type": "biogpt", "intermediate_size": 64}, 64),
        ({"model_type": "mvp", "decoder_ffn_dim": 56, "decoder_attention_heads": 4}, 56),
        ({"model_type": "gpt2"}, 4 * 32),  # n_inner is None
    ],
)
def test_an_mlp_is_as_wide_as_its_configuration_says_by_any_name(fields, width):
    sizes = {key: value for key, value in SMALL.items() if key not in ("intermediate_size", "head_dim")}
    shape = from_config({**sizes, **fields}, "x")
    assert (shape.mlp, shape.head_dim) == (width, 8)


@pytest.mark.parametrize(
    ("fields", "expected"),  # layers that route, experts, visited ones, an expert's width, a shared one's
    [
        ({"model_type": "olmoe", "num_experts": 4, "num_experts_per_tok": 2}, (3, 4, 2, 48, 0)),
        ({"model_type": "gpt_oss", "num_local_experts": 4, "num_experts_per_tok": 3}, (3, 4, 3, 48, 0)),
        (
            {
                "model_type": "glm4_moe",
                "n_routed_experts": 4,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 24,
                "n_shared_experts": 2,
            },
            (2, 4, 2, 24, 48),
        ),
        (
            {"model_type": "qwen3_next", **EXPERTS, "shared_expert_intermediate_size": 40, "intermediate_size": 16},
            (3, 4, 2, 24, 40),
        ),
        (  # every second layer, from the second on
            {"model_type": "jamba", "num_experts": 4, "num_experts_per_tok": 2, "attn_layer_offset": 1},
            (1, 4, 2, 48, 0),
        ),
        ({"model_type": "doge", "num_experts": 4, "num_experts_per_tok": 2}, (0, 4, 2, 48, 0)),  # is_moe is false
        ({"model_type": "gpt_neox", "num_experts_per_tok": 2}, (0, 0, 0, 0, 0)),  # of no expert
        ({"model_type": "exaone_moe", **EXPERTS, "first_k_dense_replace": 9}, (0, 4, 2, 24, 24)),  # of three layers
    ],
)
def test_experts_of_a_family_outside_of_the_catalogue(fields, expected):
    shape = from_config({**SMALL, **fields}, "x")
    assert (shape.moe_layers, shape.experts, shape.active_experts, shape.expert_mlp, shape.shared_mlp) == expected


def test_the_model_itself_says_whether_its_head_is_the_embedding():
    """MllamaConfig has no tie_word_embeddings of its own."""
    text = {key: value for key, value in SMALL.items() if key != "head_dim"} | {"cross_attention_layers": []}
    vision = {"hidden_size": 32, "num_hidden_layers": 1, "num_global_layers": 1, "attention_heads": 2}
    sizes = {"intermediate_size": 32, "vision_output_dim": 32, "intermediate_layers_indices": [0]}
    shape = shape_on_meta({"model_type": "mllama", "text_config": text, "vision_config": {**vision, **sizes}}, "x")
    assert not shape.tied
    assert shape_on_meta({**SMALL, "model_type": "gpt_neox", "tie_word_embeddings": True}, "x").tied


def test_a_model_in_the_local_cache(monkeypatch, tmp_path):
    import huggingface_hub

    (tmp_path / "config.json").write_text(json.dumps({**SMALL, "model_type": "llama"}))
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *a: str(tmp_path / "config.json"))
    assert shape_of("owner/name").layers == 3


@pytest.mark.parametrize("key", REQUIRED)
def test_a_missing_key_is_named(key):
    config = {k: v for k, v in SMALL.items() if k != key}
    with pytest.raises(ConfigError, match=f"has no {key}; add it"):
        from_config({**config, "model_type": "llama"}, "x")


ROUTED = {"model_type": "qwen3_moe", **EXPERTS}


@pytest.mark.parametrize("value", [0, -1, 2**63, 1.5, "32", True])
def test_a_size_without_a_meaning_is_named(value):
    with pytest.raises(ConfigError, match="hidden_size must be a whole number of 1 to 2"):
        from_config({**SMALL, "model_type": "llama", "hidden_size": value}, "x")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings must be true or false, got 'false'$"),
        ({"attention_bias": 0}, "attention_bias must be true or false, got 0$"),
        ({"sliding_window": "128"}, "sliding_window must be a whole number .*, got '128'$"),
        ({"sliding_window": 128, "use_sliding_window": "no"}, "use_sliding_window must be true or false, got 'no'$"),
        ({"num_key_value_heads": 3}, r"num_attention_heads must be a multiple of num_key_value_heads \(3\), got 4$"),
        ({**ROUTED, "moe_intermediate_size": 0}, "moe_intermediate_size must be a whole number .*, got 0$"),
        ({**ROUTED, "mlp_only_layers": 5}, "mlp_only_layers must be a list of layers, got 5$"),
        ({**ROUTED, "mlp_only_layers": ["0"]}, r"mlp_only_layers must be a list of layers, got \['0'\]$"),
        ({"model_type": "t5"}, "transformers has no causal language model of model_type 't5'$"),
    ],
)
def test_a_field_of_another_kind_is_named(fields, message):
    with pytest.raises(ConfigError, match=f"^model x: .*{message}"):
        from_config({**SMALL, "model_type": "llama", **fields}, "x")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("qwen3-5b", "did you mean qwen3-"),
        ("Qwen2.5-1.5", "did you mean qwen2.5-1.5b"),
        ("zzzzzz", "presets are tiny"),
        (
            "nobody/qwen3-4b",
            "not in the local cache: .* its shape may be the preset qwen3-4b",
        ),
        ("no-such-file.json", "there is no such file"),
        ("/no-such-folder", "there is no such file or directory$"),
        ("./no-such-folder", "there is no such file or directory$"),
        ("../a/no-such-folder", "there is no such file or directory$"),
        (str(Path(__file__).parent), "no config.json in this directory$"),
        (f"no body/{'model' * 20}", f"Repo id must .*'no body/{'model' * 20}'"),
        ("", "expected a preset, a path or a model id .*, got nothing$"),
    ],
)
def test_unknown_models(name, message, monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ConfigError, match=message) as caught:
        shape_of(name)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not a readable JSON file"),
        ("[1]", "expected a table"),
        ("{}", "has no model_type; add it"),
        ('{"model_type": "lama"}', "knows no model_type 'lama'; did you mean llama"),
        ('{"model_type": "x", "auto_map": {}}', "which is never run"),
        ('{"model_type": "bert", "hidden_size": -3}', "model "),
    ],
)
def test_unreadable_configurations(text, message, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        shape_of(str(path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("rank", [0, 3])
def test_sparse_attention_has_exactly_its_parameters(rank):
    config = {**SMALL, "model_type": "qwen3", "tie_word_embeddings": True}
    shape = replace(from_config(config, "x"), sparse=True)
    with torch.device("meta"):
        model = attach(AutoModelForCausalLM.from_config(AutoConfig.for_model(**config)))
        model = with_adapters(model, rank) if rank else model
    counts = [p.numel() for p in model.parameters() if p.requires_grad]
    assert sum(counts) == (shape.lora(rank) if rank else shape.parameters)
