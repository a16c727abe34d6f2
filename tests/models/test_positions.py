"""How far positions reach: transformers' own configurations, and what a scaling writes into them."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from logitless.errors import OptionError
from logitless.models.catalog import from_config
from logitless.models.positions import check_reach, parse_scaling, plain, reach, reached, scale
from logitless.models.presets import PRESETS

SIZES = {
    "vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
    "head_dim": 8, "intermediate_size": 24, "max_position_embeddings": 64,
}  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0}
LINEAR8 = {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}
NEAR = {"rope_type": "default", "rope_theta": 10_000.0}


def config(kind="qwen3", rope=None, **changes):
    scaling = {} if rope is None else {"rope_parameters": {"rope_theta": 10_000.0, **rope}}
    return AutoConfig.for_model(kind, **{**SIZES, **scaling, **changes})


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (config(), 64),
        (config(rope={"rope_type": "linear", "factor": 2.0}), 128),
        (config(rope={"rope_type": "dynamic", "factor": 2.5}), 160),
        (config(rope={"rope_type": "linear", "factor": 2.0, "original_max_position_embeddings": 16}), 128),
        (config(rope={**YARN, "original_max_position_embeddings": 32}), 128),  # as Qwen3 writes it: 32 scaled, 64 said
        (config(rope={**YARN, "original_max_position_embeddings": 64}, max_position_embeddings=256), 256),
        (config("llama", {**LLAMA3, "original_max_position_embeddings": 8}), 64),
        (AutoConfig.for_model("gpt2", n_positions=48), 48),
        (config("gemma3_text", layer_types=["sliding_attention", "full_attention"]), 64),
        # what transformers makes of Gemma 3 4B's, of whose positions max_position_embeddings is the whole
        (config("gemma3_text", {"full_attention": LINEAR8, "sliding_attention": NEAR}), 64),
        (AutoConfig.for_model("mamba"), None),
    ],
)
def test_what_a_configuration_reaches(given, expected):
    assert reach(given) == expected


@pytest.mark.parametrize(
    ("longest", "given", "expected"),
    [
        (64, {"rope_type": "longrope", "factor": 4.0, "original_max_position_embeddings": 64}, 64),
        (64, {"rope_type": "proportional", "factor": 4.0}, 64),
        (64, {"rope_type": "linear"}, 64),  # without a factor
        (64, YARN, 256),  # without the positions before
        (256, {**YARN, "original_max_position_embeddings": 16}, 256),  # which are more than it makes of them
        (65, {"rope_type": "linear", "factor": 1.5}, 97),  # of 97.5
        (64, {"far": {"rope_type": "dynamic", "factor": 2.0}, "near": NEAR}, 64),  # every kind of layer counts
        (64, {"far": {"rope_type": "dynamic", "factor": 2.0}, "sliding": NEAR}, 128),
    ],
)
def test_what_is_stated_and_what_a_factor_makes_of_it(longest, given, expected):
    assert reached(longest, given) == expected


def test_layers_of_which_some_are_scaled_are_not_plain():
    assert plain({"far": NEAR, "global": NEAR})
    assert not plain({"far": LINEAR8, "global": NEAR})


def test_positions_are_whole():
    ours = config()
    scale(ours, "yarn:1.55")
    assert ours.max_position_embeddings == reach(ours) == 99  # of 99.2


@pytest.mark.parametrize("kind", ["linear", "dynamic", "yarn"])
def test_a_scaling_is_the_one_that_transformers_reads(kind):
    """The same frequencies as of a configuration that had the scaling from the start."""
    ours = config()
    scale(ours, f"{kind}:4")
    assert reach(ours) == 256
    own = {"original_max_position_embeddings": 64} if kind == "yarn" else {}
    theirs = config(
        rope={"rope_type": kind, "factor": 4.0, **own}, max_position_embeddings=ours.max_position_embeddings
    )
    ids = torch.arange(200)[None] % 64
    models = []
    for each in (config(), ours, theirs):
        torch.manual_seed(0)
        models.append(AutoModelForCausalLM.from_config(each).eval())
    plain, found, exact = (model(ids, use_cache=False).logits for model in models)
    assert torch.equal(found, exact)
    assert (found - plain).abs().max() > 1e-3
    check_reach(ours, 256, "m")


@pytest.mark.parametrize("kind", ["linear", "dynamic", "yarn"])
def test_a_scaling_of_layers_that_differ_reaches_as_far(kind):
    ours = config("gemma3_text", layer_types=["sliding_attention", "full_attention"])
    scale(ours, f"{kind}:4")
    assert reach(ours) == 256
    assert ours.rope_parameters["full_attention"]["rope_type"] == kind
    assert ours.rope_parameters["sliding_attention"]["rope_type"] == "default"


def test_a_context_past_the_positions_is_told_what_would_do():
    with pytest.raises(OptionError, match=r"^--context-length 200: m has positions up to 64; --rope-scaling yarn:4 "):
        check_reach(config(), 200, "m")
    with pytest.raises(OptionError, match=r'"yarn", "factor": 4 in the rope_parameters of its config.json'):
        check_reach(config(), 200, "m", by_option=False)
    with pytest.raises(OptionError, match=r"positions up to 128; raise the factor .* 2 times"):
        check_reach(config(rope={"rope_type": "linear", "factor": 2.0}), 200, "m")
    llama3 = config("llama", {**LLAMA3, "original_max_position_embeddings": 8})
    with pytest.raises(OptionError, match=r"no factor stretches llama3 positions further: .* max_position_embeddings"):
        check_reach(llama3, 200, "m")
    gemma = config("gemma3_text", {"full_attention": LINEAR8, "sliding_attention": NEAR})
    with pytest.raises(OptionError, match=r"up to 64; no factor stretches linear .* max_position_embeddings"):
        check_reach(gemma, 200, "m")
    llama3.max_position_embeddings = 200
    check_reach(llama3, 200, "m")
    with pytest.raises(OptionError, match="a table of weights"):
        check_reach(AutoConfig.for_model("gpt2", n_positions=48), 49, "m")


@pytest.mark.parametrize("text", ["yarn", "yarn:", "yarn:0.5", "yarn:nan", "yarn:inf", "llama3:2", "4", ":4"])
def test_scalings_without_a_meaning(text):
    assert parse_scaling("yarn:1") == ("yarn", 1.0)
    with pytest.raises(OptionError, match="--rope-scaling must be a kind"):
        parse_scaling(text)


def test_models_that_cannot_be_scaled():
    with pytest.raises(OptionError, match="gpt2 has no rotary embeddings to scale"):
        scale(AutoConfig.for_model("gpt2"), "yarn:2")
    with pytest.raises(OptionError, match=r"has a scaling already \(llama3\)"):
        scale(config("llama", {**LLAMA3, "original_max_position_embeddings": 8}), "yarn:2")


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("gemma3_text", {"rope_scaling": {"rope_type": "linear", "factor": 8.0}, "rope_theta": 1e6}),  # as published
        ("gemma3_text", {"rope_parameters": {"full_attention": LINEAR8, "sliding_attention": NEAR}}),
        ("gemma2", {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}),
    ],
)
def test_a_shape_reaches_as_far_as_transformers_configuration_of_the_same_file(kind, changes):
    shape = from_config({"model_type": kind, **SIZES, **changes}, "m")
    assert shape.positions == reach(AutoConfig.for_model(kind, **SIZES, **changes))
    assert not shape.stretches


def test_a_published_gemma_3_does_not_say_how_far_it_reaches():
    fields = {name: size for name, size in SIZES.items() if name != "max_position_embeddings"}
    fields["rope_scaling"] = {"rope_type": "linear", "factor": 8.0}
    assert reach(AutoConfig.for_model("gemma3_text", **fields)) == 131_072
    assert from_config({"model_type": "gemma3_text", **fields}, "m").positions == 131_072


def test_a_shape_says_how_far_its_positions_reach():
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    fields = {**PRESETS["tiny"], "max_position_embeddings": 64}
    for changes, expected in (
        ({}, (64, True)),
        ({"rope_parameters": yarn}, (256, False)),
        ({"rope_parameters": None, "rope_scaling": yarn}, (256, False)),
        ({"rope_parameters": None}, (64, False)),
        ({"rope_parameters": {**yarn, "factor": "four"}}, (0, False)),
        ({"max_position_embeddings": None}, (0, False)),
    ):
        shape = from_config({**fields, **changes}, "m")
        assert (shape.positions, shape.stretches) == expected, changes
