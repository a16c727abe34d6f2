"""Checkpoints that are not what their configuration says: refused, since what they lack would be random."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import BertConfig, BertForMaskedLM, BertModel, GPTJConfig, GPTJForCausalLM, PreTrainedModel

from logitless.errors import ConfigError
from logitless.models.catalog import fields_of
from logitless.workbench.sft.config import TrainConfig
from logitless.workbench.sources.model import build, check_model, load_model, resolve, resolve_trained
from tests.support.workbench.micro import micro_directory, micro_model

BERT = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 64}


def load(place: Path) -> object:
    return load_model(resolve_trained(str(place), "score with"))


@pytest.mark.parametrize("tied", [True, False])
def test_a_whole_checkpoint_is_loaded(tmp_path, tied):
    model = micro_model(tie_word_embeddings=tied)
    model.save_pretrained(tmp_path)
    again = load(tmp_path).state_dict()
    assert all((again[name] == x).all() for name, x in model.state_dict().items())


@pytest.mark.parametrize("name", list(micro_model(tie_word_embeddings=False).state_dict()))
def test_a_checkpoint_that_lacks_any_one_tensor(tmp_path, name):
    model = micro_model(tie_word_embeddings=False)
    model.save_pretrained(tmp_path, state_dict={k: x for k, x in model.state_dict().items() if k != name})
    with pytest.raises(ConfigError, match=rf"--model {tmp_path}: its weights lack {name}, which its config.json asks"):
        load(tmp_path)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int64, torch.bool])
def test_weights_of_whole_numbers_are_refused(tmp_path, dtype):
    """transformers reads them as if they were weights."""
    model = micro_model()
    state = model.state_dict()
    name = "model.layers.0.mlp.up_proj.weight"
    model.save_pretrained(tmp_path, state_dict={**state, name: state[name].to(dtype)})
    with pytest.raises(ConfigError, match=f"--model {tmp_path}: expected weights in floating point, got {name} in "):
        load(tmp_path)


def test_weights_of_float16_are_trained_by_adapters_or_in_another_dtype(tmp_path):
    """Squares of their gradients are 0 in float16, and AdamW divides by them: the loss became NaN."""
    micro_model().half().save_pretrained(tmp_path)
    source, config = resolve(str(tmp_path)), TrainConfig(model=str(tmp_path), context_length=8)
    with pytest.raises(ConfigError, match=f"--model {tmp_path}: its weights are of float16, .* --dtype float32 or bf"):
        build(config, source)
    for other in (replace(config, dtype="bfloat16"), replace(config, lora_rank=2)):
        trained = {x.dtype for x in build(other, source).parameters() if x.requires_grad}
        assert trained == {torch.float32 if other.lora_rank else torch.bfloat16}


def with_tensors(place: Path, model: PreTrainedModel, *names: str) -> Path:
    """A checkpoint with tensors besides."""
    model.save_pretrained(place, state_dict={**model.state_dict(), **{name: torch.zeros(4) for name in names}})
    return place


@pytest.mark.parametrize("kept", [1, 2])
def test_a_checkpoint_with_more_layers_than_its_configuration(tmp_path, kept):
    micro_model(num_hidden_layers=3).save_pretrained(tmp_path)
    micro_model(num_hidden_layers=kept).config.save_pretrained(tmp_path)
    said = (
        rf"its weights have model.layers.{kept}.input_layernorm.weight, .* and \d+ more, which its config.json has no "
    )
    with pytest.raises(ConfigError, match=said):
        load(tmp_path)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.1.self_attn.q_proj.bias",
        "model.layers.0.self_attn.g_proj.weight",
        "model.layers.0.extra_norm.weight",
        "model.layers.7.mlp.up_proj.weight",
        "model.norm.bias",
        "lm_head.bias",
    ],
)
def test_a_tensor_of_the_models_own_layers_that_it_has_no_place_for(tmp_path, name):
    with pytest.raises(ConfigError, match=rf"--model {tmp_path}: its weights have {name}, which its config.json has"):
        load(with_tensors(tmp_path, micro_model(), name))


def test_parts_that_a_model_does_not_have_and_old_buffers_are_left_out(tmp_path):
    load(
        with_tensors(
            tmp_path / "a", micro_model(), "score.weight", "model.vision.layers.0.q_proj.weight", "mtp.0.weight"
        )
    )
    load(with_tensors(tmp_path / "b", micro_model(), "model.layers.0.self_attn.rotary_emb.inv_freq"))
    tied = micro_model(tie_word_embeddings=True)
    tied.save_pretrained(tmp_path / "c", state_dict={**tied.state_dict(), "lm_head.weight": tied.lm_head.weight + 0})
    load(tmp_path / "c")
    config = GPTJConfig(vocab_size=64, n_embd=32, n_layer=1, n_head=2, rotary_dim=8, n_positions=16)
    masks = ("bias", "masked_bias", "causal_mask")
    load(with_tensors(tmp_path / "d", GPTJForCausalLM(config), *(f"transformer.h.0.attn.{mask}" for mask in masks)))


def test_many_tensors_are_named_and_counted(tmp_path):
    BertModel(BertConfig(**BERT)).save_pretrained(tmp_path)
    micro_model().config.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"its weights lack lm_head.weight, .* and \d\d more, which its config"):
        load(tmp_path)


@pytest.mark.parametrize("kind", ["gpt_neox", "gpt_neox_japanese"])
def test_a_decoder_whose_configuration_says_that_it_is_none(tmp_path, kind):
    """As Pythia's; no token changes what was predicted before it."""
    path = micro_directory(tmp_path, model_type=kind)
    model = load_model(resolve(str(path))).eval()
    assert not model.config.is_decoder
    ids = torch.arange(3, 11)[None]
    with torch.no_grad():
        torch.testing.assert_close(model(ids[:, :5]).logits, model(ids).logits[:, :5])


def test_a_model_that_sees_what_follows(tmp_path):
    """All its weights are there, and its loss would be that of a model which reads the answer."""
    BertForMaskedLM(BertConfig(**BERT)).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="expected a causal language model, got BertForMaskedLM, which sees what fol"):
        load(tmp_path)


ROTARY = {"rope_theta": 10_000.0}


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        (
            "rope_parameters",
            {**ROTARY, "rope_type": "yarn", "factor": "a"},
            "numbers in rope_parameters, got 64 and .*'a'",
        ),
        ("max_position_embeddings", 0, "expected a positive max_position_embeddings, .* got 0"),
        ("max_position_embeddings", -1, "expected a positive max_position_embeddings, .* got -1"),
        ("nsa", 3, "nsa: expected whole numbers for some of block, stride, .* got 3"),
        ("nsa", {"blocks": 3}, "nsa: expected whole numbers for some of block, stride, .* got .*blocks"),
        ("nsa", {"block": "a"}, "nsa: expected whole numbers for some of block, stride, .* got .*'a'"),
        ("nsa", {"block": 0}, "nsa block must be at least 1, got 0"),
        ("text_config", {"model_type": "qwen3"}, "expected a vocab_size, and a text_config that is one, got"),
        ("text_config", 3, "expected a vocab_size, and a text_config that is one, got 3"),
        ("attention_dropout", 2.0, "attention_dropout: expected a share, 0 to 1, got 2.0"),
        ("attention_dropout", -1, "attention_dropout: expected a share, 0 to 1, got -1"),
        ("is_encoder_decoder", True, "expected a causal language model, got Qwen3ForCausalLM"),
        ("hidden_size", 16, r"asks for a lm_head.weight of \(259, 16\), its weights have \(259, 32\)"),
    ],
)
def test_a_configuration_that_nothing_can_be_made_of(tmp_path, key, value, said):
    """transformers reads it: tracebacks came when positions were counted, the model was built or dropout drawn."""
    micro_model(tie_word_embeddings=False).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, key: value}))
    with pytest.raises(ConfigError, match=f"^--model {tmp_path}: .*{said}"):
        load(tmp_path)


@pytest.mark.parametrize("key", ["output_attentions", "output_hidden_states", "return_dict"])
def test_what_a_forward_returns_is_not_for_its_configuration_to_say(tmp_path, key):
    micro_model().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, key: key != "return_dict"}))
    model = load(tmp_path)
    assert list(model(torch.tensor([[1, 2]]), use_cache=False)) == ["logits"]
    model.save_pretrained(tmp_path / "again")


@pytest.mark.parametrize("name", ["tiny", "qwen3-4b", "smollm2"])
def test_a_known_name_that_is_a_models_directory_here_too(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    micro_model().save_pretrained(name)
    for wish in (None, "score with"):
        with pytest.raises(
            ConfigError, match=rf"model {name}: a known model and a directory .*; ./{name} is the"
        ) as said:
            check_model(name, wish)
        assert "\n" not in str(said.value)
    assert resolve(f"./{name}").weights == f"./{name}"


def test_a_known_shape_that_is_a_models_directory_here_too(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    micro_model().save_pretrained("4b")
    with pytest.raises(ConfigError, match=r"\./4b is the directory"):
        fields_of("4b")
    assert fields_of("./4b")[0]["hidden_size"] == micro_model().config.hidden_size


def test_a_directory_of_a_presets_name_that_is_no_model_is_none(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("tiny").mkdir()
    assert resolve("tiny").weights is None
    with pytest.raises(ConfigError, match="got a configuration without weights"):
        check_model("tiny", "score with")


@pytest.mark.parametrize("given", [".", "adapter"])
def test_a_runs_directory_in_the_place_of_its_model(given, tmp_path):
    micro_model().save_pretrained(tmp_path / "model")
    (tmp_path / "adapter").mkdir()
    with pytest.raises(ConfigError, match=r"no config.json in this directory; did you mean .*model\?$"):
        check_model(str(tmp_path / given))


def test_a_misspelt_packaged_model():
    with pytest.raises(ConfigError, match=r"--model smolm2: .* got nothing of this name; did you mean smollm2\?$"):
        check_model("smolm2", "score with")
