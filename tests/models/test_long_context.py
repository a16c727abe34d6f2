"""A tiled MLP and offloaded inputs: the same gradients with less memory, and clear refusals."""

import copy

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from logitless.errors import ConfigError, OptionError
from logitless.models.instances import checkpoint_layers, with_adapters
from logitless.models.long_context import lightened, offload_inputs, tile_mlp
from tests.support.allocations import largest_allocation

SIZES = {
    "vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 1,
    "head_dim": 8, "intermediate_size": 512,
}  # fmt: skip


def model(kind="qwen3", dtype=torch.float64, **more):
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **(SIZES | more))
    return AutoModelForCausalLM.from_config(config, dtype=dtype).train()


def gradients(model, length=37):
    ids = torch.arange(2 * length).view(2, length) % 64
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("tiles", [2, 5, 37, 100])
@pytest.mark.parametrize(("checkpointing", "offload"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("adapted", [False, True])
def test_gradients_are_those_of_the_plain_model(tiles, checkpointing, offload, adapted):
    plain, light = model(), lightened(model(), checkpointing, offload, tiles)
    if adapted:
        torch.manual_seed(1)
        plain = with_adapters(plain, 2)
        torch.manual_seed(1)
        light = with_adapters(light, 2)
    wanted, found = gradients(plain), gradients(light)
    assert wanted.keys() == found.keys()
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient)


def test_only_a_tile_has_the_mlps_width():
    length, width = 400, SIZES["intermediate_size"] * 8
    whole, tiled = model(), tile_mlp(model(), 8)
    assert largest_allocation(lambda: gradients(whole, length)) >= 2 * length * width
    assert largest_allocation(lambda: gradients(tiled, length)) < 2 * length * width / 4


def test_without_gradients_nothing_is_computed_twice():
    tiled, calls = tile_mlp(model(), 4), []
    tiled.model.layers[0].mlp.down_proj.register_forward_hook(lambda *_: calls.append(1))
    with torch.no_grad():
        tiled(torch.zeros(1, 8, dtype=torch.long))
    assert len(calls) == 4


def test_a_copy_of_a_tiled_model_has_weights_of_its_own():
    tiled = tile_mlp(model(), 2).eval()
    other = copy.deepcopy(tiled)
    ids = torch.zeros(1, 8, dtype=torch.long)
    before = other(ids).logits
    with torch.no_grad():
        for p in tiled.parameters():
            p.zero_()
    assert torch.equal(other(ids).logits, before)


def test_inputs_of_layers_wait_on_the_host():
    light, moved = offload_inputs(checkpoint_layers_of(model())), []
    original = torch.Tensor.cpu
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "cpu", lambda x: (moved.append(tuple(x.shape)), original(x))[1])
        gradients(light)
    assert moved.count((2, 37, 16)) == SIZES["num_hidden_layers"]


def checkpoint_layers_of(model):
    checkpoint_layers(model)
    return model


def test_offloading_needs_checkpointing():
    with pytest.raises(ConfigError, match="--offload-activations needs --gradient-checkpointing"):
        offload_inputs(model())


def test_models_that_route_are_refused_and_left_alone():
    routing = model("qwen3_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8)
    classes = [type(m) for m in routing.modules()]
    with pytest.raises(ConfigError, match=r"needs dense MLPs: .* has layers that route"):
        tile_mlp(routing, 2)
    assert [type(m) for m in routing.modules()] == classes
    with pytest.raises(ConfigError, match="no layer with an mlp"):
        tile_mlp(torch.nn.Linear(2, 2), 2)


def test_tiles_are_set_once():
    tiled = tile_mlp(model(), 2)
    with pytest.raises(ConfigError, match="--mlp-tiles 4: Qwen3ForCausalLM has 2 already"):
        tile_mlp(tiled, 4)


def test_one_tile_is_the_model_as_it_was():
    plain = model()
    classes = [type(m) for m in plain.modules()]
    assert [type(m) for m in tile_mlp(plain, 1).modules()] == classes


def test_less_than_one_tile():
    with pytest.raises(OptionError, match="--mlp-tiles must be at least 1, got 0"):
        tile_mlp(model(), 0)
