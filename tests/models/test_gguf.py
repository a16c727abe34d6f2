"""GGUF files: what a header says, transformers' model out of one, and one line for what is none or damaged."""

import json
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import gguf
import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    Lfm2Config,
    MambaConfig,
    NemotronConfig,
    Qwen3Config,
    StableLmConfig,
    Starcoder2Config,
)

from logitless.errors import ConfigError
from logitless.models.catalog import shape_of
from logitless.models.gguf.config import complete
from logitless.models.gguf.convert import _drop_unknown, convert
from logitless.models.gguf.header import (
    Header,
    _check_layers,
    _check_sizes,
    config_fields,
    file_of,
    linear_scaling,
    read_header,
)
from logitless.models.gguf.positions import rope_parameters
from logitless.models.positions import reach
from logitless.models.pretrained import PACKAGES
from logitless.models.shapes import ModelShape
from tests.support.workbench.packed import SHAPE, TEMPLATE, cut, gguf_of, micro_gguf, micro_llama, micro_tensors


@pytest.fixture
def file(tmp_path):
    return micro_gguf(tmp_path / "micro.gguf")


def test_a_header_says_what_the_model_is(file):
    header = read_header(file)
    assert header.architecture == "llama"
    assert header.values["tokenizer.chat_template"] == TEMPLATE
    assert "tokenizer.ggml.tokens" not in header.values
    assert header.shapes["token_embd.weight"] == (320, 32)
    assert header.shapes["blk.1.ffn_down.weight"] == (32, 64)
    assert {key: x for key, x in config_fields(file, read_header(file)).items() if key in SHAPE} == SHAPE


def test_a_plan_takes_a_file_without_converting_it(file):
    shape = shape_of(str(file))
    assert isinstance(shape, ModelShape)
    assert shape.parameters == sum(p.numel() for p in micro_llama().parameters())


def test_a_converted_file_is_the_model_that_was_written(file, tmp_path):
    convert(file, tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    expected = micro_llama().state_dict()
    assert all(torch.equal(x, expected[name]) for name, x in model.state_dict().items())
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert tokenizer("ab c")["input_ids"] == [*map(tokenizer.get_vocab().get, ["ab", "Ġ", "c"])]
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<s>", "</s>")
    assert tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False) == "<s>user\na</s>\n"


def test_names_that_lead_to_a_file(file, tmp_path):
    assert file_of(str(file)) == file
    assert file_of(f"{tmp_path}:micro.gguf") == file
    assert file_of(str(tmp_path)) == file
    assert all(file_of(name) is None for name in ("tiny", "owner/name", str(tmp_path / "none"), *PACKAGES))
    (tmp_path / "config.json").write_text("{}")
    assert file_of(str(tmp_path)) is None
    (tmp_path / "config.json").unlink()
    micro_gguf(tmp_path / "other.gguf")
    with pytest.raises(ConfigError, match=rf"has 2 GGUF files; name one, as {tmp_path}:micro.gguf"):
        file_of(str(tmp_path))
    for name in (f"{tmp_path}:none.gguf", str(tmp_path / "none.gguf")):
        with pytest.raises(ConfigError, match="expected a GGUF file, there is none at"):
            file_of(name)


def test_names_in_capitals(file):
    place = file.rename(file.with_suffix(".GGUF"))
    assert file_of(str(place)) == place


def test_fields_by_transformers_names():
    """A size of 0 is none, and a head of its own a tensor."""
    told = {"embedding_length": 32, "expert_count": 8, "expert_feed_forward_length": 24, "attention.sliding_window": 0}
    header = Header("qwen3moe", {f"qwen3moe.{key}": x for key, x in told.items()}, {"token_embd.weight": (320, 32)})
    expected = {"model_type": "qwen3_moe", "vocab_size": 320, "hidden_size": 32, "tie_word_embeddings": True}
    assert config_fields(Path("m"), header) == expected | {"num_experts": 8, "moe_intermediate_size": 24}
    header.shapes["output.weight"] = (320, 32)
    assert not config_fields(Path("m"), header)["tie_word_embeddings"]
    for architecture, kind in (("gemma3", "gemma3_text"), ("qwen2moe", "qwen2_moe"), ("llama", "llama")):
        assert config_fields(Path("m"), Header(architecture, {}, header.shapes))["model_type"] == kind
    with pytest.raises(ConfigError, match=r"expected a language model, this GGUF file has no token_embd\.weight"):
        config_fields(Path("m"), Header("clip", {}, {}))


@pytest.mark.parametrize("factor", [0, 0.0, -2.0, float("inf"), float("nan"), "4", None])
def test_a_factor_that_stretches_nothing(factor):
    told = {"m.rope.scaling.type": "linear", "m.rope.scaling.factor": factor}
    assert linear_scaling(Header("m", told, {})) == {}


@pytest.mark.parametrize(
    ("told", "shapes", "said"),
    [
        ({"expert_feed_forward_length": 24}, {"ffn_down_exps.weight": (4, 32, 64)}, r"says \(4, 32, 24\)"),
        ({}, {"ffn_down_exps.weight": (4, 32, 24)}, r"says \(4, 32, 64\)"),
        ({}, {"ffn_down_exps.weight": (4, 32, 64), "ffn_down.weight": (32, 64)}, None),
        ({"attention.key_length": 64}, {"attn_k.weight": (32, 32)}, r"says \(64, 32\)"),
        ({"attention.key_length": 64, "attention.key_length_swa": 32}, {"attn_k.weight": (32, 32)}, None),
        ({"block_count": 1}, {}, "its header says 1 layers, its tensors are of 2"),
        ({"block_count": 2}, {"blk.2.attn_k.weight": (16, 32)}, "its tensors are of 2; get it anew"),
    ],
)
def test_sizes_of_experts_and_of_heads_of_two_kinds(told, shapes, said):
    usual = {"expert_count": 4, "embedding_length": 32, "feed_forward_length": 64, "block_count": 2}
    usual |= {"attention.head_count": 2, "attention.head_count_kv": 1}
    other = {} if "blk.2.attn_k.weight" in shapes else {"blk.1.attn_q.weight": (32, 32)}
    tensors = {name if name.startswith("blk") else f"blk.0.{name}": x for name, x in shapes.items()} | other
    header = Header(
        "m", {f"m.{key}": x for key, x in (usual | told).items()}, {"blk.0.attn_q.weight": (32, 32)} | tensors
    )
    with pytest.raises(ConfigError, match=said) if said else nullcontext():
        _check_layers(Path("m"), header)
        _check_sizes(Path("m"), header)


def put(path, at: int, what: bytes) -> None:
    data = bytearray(path.read_bytes())
    data[at : at + len(what)] = what
    path.write_bytes(data)


DAMAGES = {
    "empty": (lambda path: cut(path, 0), "expected a GGUF file, which begins with GGUF"),
    "another kind of file": (lambda path: put(path, 0, b"PK\3\4"), "expected a GGUF file, which begins with GGUF"),
    "a version of the future": (lambda path: put(path, 4, b"\x09"), "expected GGUF version 2 or 3, got 9"),
    "a version of the past": (lambda path: put(path, 4, b"\x01"), "expected GGUF version 2 or 3, got 1"),
    "cut within the header": (lambda path: cut(path, 200), "damaged or cut short"),
    "cut behind the magic": (lambda path: cut(path, 6), "damaged or cut short"),
    "a length without end": (lambda path: put(path, 24, b"\xff" * 8), "damaged or cut short"),
    "an unknown kind of value": (lambda path: put(path, 32 + len("general.architecture"), b"\x63"), "damaged or cut"),
    "cut within the weights": (lambda path: cut(path, 0.6), "damaged or cut short"),
}


@pytest.mark.parametrize("what", DAMAGES)
def test_a_damaged_file_is_one_line(file, what):
    damage, expected = DAMAGES[what]
    damage(file)
    with pytest.raises(ConfigError, match=expected) as caught:
        read_header(file)
    assert str(file) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_weights_that_end_early_are_found_when_they_are_read(file, tmp_path):
    cut(file, file.stat().st_size - 8)  # of the last tensor
    read_header(file)
    with pytest.raises(ConfigError, match="cannot be read, most likely damaged or cut short"):
        convert(file, tmp_path / "model")


def test_an_architecture_that_transformers_does_not_read(tmp_path):
    file = micro_gguf(tmp_path / "odd.gguf", "bert")
    with pytest.raises(ConfigError, match=r"odd.gguf: .*bert.* not supported"):
        convert(file, tmp_path / "model")


def ones(*shape: int) -> np.ndarray:
    return np.ones(shape, np.float32)


LLAMA3 = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
NEAR_AND_FAR = {"rope_type": "default", "rope_theta": 10000.0}
LLAMA3 |= {"original_max_position_embeddings": 8192, "rope_theta": 10000.0}


def divisors() -> np.ndarray:
    """What a converter of llama.cpp writes for Llama 3.2, here of heads of 16."""
    frequencies = 10000.0 ** -(np.arange(0, 16, 2) / 16)
    waves, low, high = 2 * np.pi / frequencies, 8192 / 1.0, 8192 / 4.0
    between = (8192 / waves - 1.0) / (4.0 - 1.0)
    found = np.where(waves < high, 1.0, np.where(waves > low, 32.0, 1 / ((1 - between) / 32 + between)))
    return found.astype(np.float32)


OTHERS = {  # what a file has beside or in the place of the model's tensors, and what is said
    "a layer too few": ({"sizes": {"num_hidden_layers": 3}}, "its header says 3 layers, its tensors are of 2"),
    "a layer too many": ({"sizes": {"num_hidden_layers": 1}}, "its header says 1 layers, its tensors are of 2"),
    "no layer": ({"sizes": {"num_hidden_layers": 0}}, "its header says 0 layers"),
    "layers without end": ({"sizes": {"num_hidden_layers": 2**31 - 1}}, "its header says 2147483647 layers"),
    "no end to its width": (
        {"sizes": {"hidden_size": 2**28}},
        r"token_embd.weight has shape \(320, 32\), where its header",
    ),
    "no end to its layers' width": (
        {"sizes": {"intermediate_size": 2**30}},
        r"where its header says \(32, 1073741824\)",
    ),
    "no end to its heads": (
        {"sizes": {"head_dim": 2**30}},
        r"blk.0.attn_k.weight has shape \(16, 32\), where its header",
    ),
    "no end to its entries": ({"sizes": {"vocab_size": 2**30}}, r"where its header says \(1073741824, 32\)"),
    "many heads": ({"sizes": {"num_attention_heads": 4}}, r"blk.0.attn_k.weight .* its header says \(8, 32\)"),
    "many heads of keys": ({"sizes": {"num_key_value_heads": 2}}, r"blk.0.attn_k.weight .* its header says \(32, 32\)"),
    "no last norm": ({"output_norm.weight": None}, "lacks model.norm.weight; get it anew"),
    "no embedding": ({"token_embd.weight": None}, "lacks lm_head.weight, model.embed_tokens.weight"),
    "no product": ({"blk.1.ffn_down.weight": None}, "lacks model.layers.1.mlp.down_proj.weight"),
    "a bias": ({"blk.0.attn_q.bias": ones(32)}, "hold 28,864 numbers, the llama model that is read from it 28,832"),
    "a norm": ({"blk.0.attn_q_norm.weight": ones(16)}, "the llama model that is read from it 28,832: it"),
    "a bias of the head": ({"output.bias": ones(320)}, "read from it 28,832"),
    "a wide norm": (
        {"output_norm.weight": ones(64)},
        r"norm.weight has shape \(64,\), where its header says \(32,\)",
    ),
    "YaRN": ({"stretched": ("yarn", 4.0)}, r"not read from GGUF files \(rope.scaling.type yarn\)"),
    "LongRoPE": ({"rope_factors_long.weight": ones(8)}, "not read from GGUF files"),
    "other divisors": ({"rope_freqs.weight": ones(8) * 4}, "not read from GGUF files"),
    "divisors that are near": ({"rope_freqs.weight": divisors() * np.float32(1.001)}, "not read from GGUF files"),
    "divisors of other heads": ({"rope_freqs.weight": divisors()[:4]}, "not read from GGUF files"),
}


def other_file(path, changed: dict):
    options = {name: x for name, x in changed.items() if name in ("sizes", "stretched")}
    tensors = {**micro_tensors(), **{name: x for name, x in changed.items() if name not in options}}
    return micro_gguf(path, tensors={name: x for name, x in tensors.items() if x is not None}, **options)


@pytest.mark.parametrize("what", OTHERS)
def test_a_file_that_is_another_model_is_refused(tmp_path, what):
    """Not filled up with random weights, nor read without some of its own."""
    changed, said = OTHERS[what]
    file = other_file(tmp_path / "other.gguf", changed)
    with pytest.raises(ConfigError, match=said) as caught:
        convert(file, tmp_path / "model")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "model").exists()


def test_a_plan_does_not_believe_a_header_whose_tensors_are_of_other_sizes(tmp_path):
    file = other_file(tmp_path / "other.gguf", {"sizes": {"num_hidden_layers": 160}})
    with pytest.raises(ConfigError, match="its header says 160 layers, its tensors are of 2"):
        shape_of(str(file))
    file = other_file(tmp_path / "other.gguf", {"sizes": {"hidden_size": 4096}})
    with pytest.raises(
        ConfigError, match=r"token_embd.weight has shape \(320, 32\), where its header says \(320, 4096\)"
    ):
        shape_of(str(file))


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"stretched": ("none", 1.0)}, {"rope_type": "default", "rope_theta": 10000.0}),
        ({"stretched": ("linear", 8.0)}, {"rope_type": "linear", "factor": 8.0, "rope_theta": 10000.0}),
        ({"rope_freqs.weight": divisors()}, LLAMA3),
    ],
)
def test_stretched_positions_are_the_models(tmp_path, changed, expected):
    """transformers itself reads none of it: far positions would be those of another model."""
    file = other_file(tmp_path / "far.gguf", changed)
    convert(file, tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert model.config.rope_parameters == expected
    plain = 10000.0 ** -(torch.arange(0, 16, 2) / 16)
    divided = torch.from_numpy(changed.get("rope_freqs.weight", ones(8) * expected.get("factor", 1.0)))
    torch.testing.assert_close(model.model.rotary_emb.inv_freq, plain / divided)
    assert shape_of(str(file)).positions == reach(model.config)


def test_heads_that_are_turned_in_part_are_refused_where_transformers_turns_them_as_a_whole(tmp_path):
    values = {**SIZES, RMS: 1e-5, "attention.key_length": 16, "rope.dimension_count": 8}
    file = gguf_of(tmp_path / "part.gguf", "llama", micro_llama(), values)
    with pytest.raises(ConfigError, match=r"its positions turn 8 numbers of a head's 16, those of .* llama model all"):
        convert(file, tmp_path / "model")


@pytest.mark.parametrize(
    ("known", "told"),
    [
        ({"rope_type": "linear", "factor": 2.0}, {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0}),
        ({"full_attention": NEAR_AND_FAR, "sliding_attention": NEAR_AND_FAR}, {"rope.dimension_count": 8}),
    ],
)
def test_what_transformers_reads_of_positions_stays(known, told):
    """Of a stretch that it knows, and of layers that differ."""
    config = SimpleNamespace(rope_parameters=known, head_dim=16, model_type="m")
    header = Header("m", {f"m.{key}": x for key, x in told.items()}, {})
    assert rope_parameters(Path("m"), header, config) == known


def test_tokens_behind_the_last_row_are_left_out(tmp_path):
    tokens = [{"id": i, "content": f"<{i}>"} for i in (1, 319, 320, 400)]
    (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": tokens}))
    _drop_unknown(tmp_path / "tokenizer.json", 320)
    assert json.loads((tmp_path / "tokenizer.json").read_text()) == {"added_tokens": tokens[:2]}


def test_a_part_of_a_file_says_so(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama", split_max_tensors=9)
    for name, x in micro_tensors().items():
        writer.add_tensor(name, x)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    for part in (1, 3):
        with pytest.raises(ConfigError, match=f"m-0000{part}-of-00003.gguf: this is one of 3 parts .*; join them with"):
            read_header(tmp_path / f"m-0000{part}-of-00003.gguf")


RMS, NORM = "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"
SIZES = {
    "context_length": 64,
    "embedding_length": 32,
    "feed_forward_length": 64,
    "block_count": 2,
    "attention.head_count": 2,
    "attention.head_count_kv": 1,
}
NEAR = {"context_length": 48, "embedding_length": 32, "block_count": 2, "attention.head_count": 2}
STATES = {"ssm.conv_kernel": 4, "ssm.inner_size": 64, "ssm.state_size": 16, "ssm.time_step_rank": 2}
PLAIN = {**SHAPE, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def rotary(theta: float, **more: float) -> dict:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta, **more}}


def plus_one(name: str, x: torch.Tensor) -> torch.Tensor:
    return x + 1 if "norm.weight" in name or "layernorm.weight" in name else x


def turned(name: str, x: torch.Tensor) -> torch.Tensor:
    return x.T if name.endswith(("c_attn.weight", "c_fc.weight", "c_proj.weight")) else x


def scanned(name: str, x: torch.Tensor) -> torch.Tensor:
    return -x.exp() if name.endswith("A_log") else x.squeeze(1) if "conv1d.weight" in name else x


def squeezed(name: str, x: torch.Tensor) -> torch.Tensor:
    return x.squeeze(1) if name.endswith("conv.conv.weight") else x


# A model, its architecture, what its file says beside its sizes, and how llama.cpp arranges its weights.
MODELS = {
    "an epsilon, frequencies": (
        Starcoder2Config(**PLAIN, **rotary(1e6), norm_epsilon=1e-2),
        ("starcoder2", {**SIZES, NORM: 1e-2, "rope.freq_base": 1e6}, None),
    ),
    "a part of each head": (
        StableLmConfig(**PLAIN, **rotary(1e4, partial_rotary_factor=0.5)),
        ("stablelm", {**SIZES, NORM: 1e-5, "rope.dimension_count": 8}, None),
    ),
    "heads as a whole": (
        NemotronConfig(**PLAIN, **rotary(1e4, partial_rotary_factor=1.0), norm_eps=1e-2),
        ("nemotron", {**SIZES, NORM: 1e-2, "rope.dimension_count": 16, "vocab_size": 320}, plus_one),
    ),
    "narrow heads": (
        Qwen3Config(**PLAIN, head_dim=24),
        ("qwen3", {**SIZES, RMS: 1e-6, "attention.key_length": 24}, None),
    ),
    "softcaps, a window": (
        Gemma2Config(
            **PLAIN,
            head_dim=16,
            query_pre_attn_scalar=16,
            attn_logit_softcapping=20.0,
            final_logit_softcapping=10.0,
            sliding_window=8,
        ),
        (
            "gemma2",
            {
                **SIZES,
                RMS: 1e-6,
                "attention.key_length": 16,
                "attention.sliding_window": 8,
                "attn_logit_softcapping": 20.0,
                "final_logit_softcapping": 10.0,
            },
            plus_one,
        ),
    ),
    "a table of positions": (
        GPT2Config(vocab_size=320, n_embd=32, n_layer=2, n_head=2, n_positions=48, bos_token_id=1, eos_token_id=2),
        ("gpt2", {**NEAR, "feed_forward_length": 128, NORM: 1e-5}, turned),
    ),
    "no positions": (
        MambaConfig(vocab_size=320, hidden_size=32, num_hidden_layers=2),
        ("mamba", {**NEAR, "feed_forward_length": 0, RMS: 1e-5, **STATES}, scanned),
    ),
    "convolutions": (
        Lfm2Config(
            **PLAIN,
            **rotary(1e4),
            norm_eps=1e-5,
            layer_types=["conv", "full_attention"],
            block_auto_adjust_ff_dim=False,
        ),
        (
            "lfm2",
            {**SIZES, "attention.head_count_kv": [0, 1], RMS: 1e-5, "rope.freq_base": 1e4, "shortconv.l_cache": 3},
            squeezed,
        ),
    ),
}


@pytest.mark.parametrize("what", MODELS)
def test_what_a_header_says_is_the_models(tmp_path, what):
    """transformers leaves some of it at another model's default: every number would be off without a word."""
    config, (architecture, values, arranged) = MODELS[what]
    torch.manual_seed(0)
    written = AutoModelForCausalLM.from_config(config).eval()
    for x in written.parameters():
        x.data.add_(0.3 * torch.randn_like(x))
    convert(gguf_of(tmp_path / "m.gguf", architecture, written, values, arranged), tmp_path / "model")
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
    ids = torch.randint(3, 256, (1, 40))
    with torch.no_grad():
        torch.testing.assert_close(read(ids).logits, written(ids).logits)


@pytest.mark.parametrize(("layers", "scalar"), [(46, 16), (42, 24)])
def test_the_largest_gemma_2_is_scaled_by_its_width(layers, scalar):
    """llama.cpp knows it by the number of its layers."""
    config = Gemma2Config(**{**PLAIN, "num_hidden_layers": layers}, head_dim=24)
    complete(config, Header("gemma2", {"gemma2.block_count": layers}, {}))
    assert config.query_pre_attn_scalar == scalar


@pytest.mark.parametrize(("layers", "scalar"), [(62, 16), (48, 24)])
def test_the_largest_gemma_3_too(layers, scalar):
    config = Gemma3TextConfig(**{**PLAIN, "num_hidden_layers": layers}, head_dim=24)
    far, near = (config.rope_parameters[kind]["rope_theta"] for kind in ("full_attention", "sliding_attention"))
    told = {"block_count": layers, "rope.freq_base": 2.0 * far, "attention.sliding_window": 0}
    complete(config, Header("gemma3", {f"gemma3.{key}": x for key, x in told.items()}, {}))
    assert config.query_pre_attn_scalar == scalar
    thetas = [config.rope_parameters[kind]["rope_theta"] for kind in ("full_attention", "sliding_attention")]
    assert thetas == [2.0 * far, near]
    assert config.sliding_window is None


@pytest.mark.parametrize(
    ("key", "value", "name"),
    [
        ("expert_feed_forward_length", 24, "moe_intermediate_size"),
        ("expert_shared_feed_forward_length", 40, "shared_expert_intermediate_size"),
        ("context_length", 48, "n_positions"),
        *(("attention.layer_norm_epsilon", 1e-2, name) for name in ("layer_norm_eps", "layer_norm_epsilon")),
        *(("attention.layer_norm_epsilon", 1e-2, name) for name in ("norm_epsilon", "norm_eps")),
    ],
)
def test_a_field_is_what_the_header_says(key, value, name):
    config = SimpleNamespace(**{name: 1})
    complete(config, Header("m", {f"m.{key}": value}, {}))
    assert vars(config) == {name: value}


def test_heads_of_two_sizes_stay_what_transformers_read():
    config = SimpleNamespace(head_dim=256)
    complete(config, Header("m", {"m.attention.key_length": 512, "m.attention.key_length_swa": 256}, {}))
    assert config.head_dim == 256


def test_a_plan_of_a_model_that_its_header_does_not_describe(tmp_path):
    config, (architecture, values, arranged) = MODELS["convolutions"]
    file = gguf_of(tmp_path / "m.gguf", architecture, AutoModelForCausalLM.from_config(config), values, arranged)
    with pytest.raises(ConfigError, match="its tensors hold 29,984 numbers, the lfm2 model that is read from it"):
        shape_of(str(file))
