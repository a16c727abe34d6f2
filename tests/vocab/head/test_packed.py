"""torchao's and bitsandbytes' quantised tensors as heads: real ones where installed, imitations of them anywhere."""

from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

import logitless as ll
from logitless.errors import ConfigError
from logitless.vocab.head.packed import quantised
from tests.support.vocab.comparing import ALONE, compare
from tests.support.vocab.quantised import stored
from tests.support.vocab.refusing import refused

V, H = 203, 128
NF4 = torch.tensor(
    [-1.0, -0.6962, -0.5251, -0.3949, -0.2844, -0.1848, -0.0911, 0.0, 0.0796, 0.1609, 0.2461, 0.3379, 0.4407, 0.5626,
     0.723, 1.0]
)  # fmt: skip


def imitation(name: str, package: str, base: type = Tensor) -> type:
    """A tensor class by whose name and package the real one is known."""
    return type(name, (base,), {"__module__": package})


def torchao(name: str, q: Tensor, scale: Tensor, zero_point: Tensor | None = None, dtype=torch.bfloat16, **more):
    """(a tensor as torchao makes it, its numbers)."""
    fake = torch.empty(q.shape, dtype=dtype).as_subclass(imitation(name, "torchao.quantization"))
    size = [1, q.shape[1] // scale.shape[1]] if scale.shape[0] == q.shape[0] else list(q.shape)
    for key, value in {"qdata": q, "scale": scale, "zero_point": zero_point, "block_size": size, **more}.items():
        setattr(fake, key, value)
    each = scale.repeat_interleave(q.shape[1] // scale.shape[1], 1)
    zero = 0 if zero_point is None else zero_point.repeat_interleave(q.shape[1] // scale.shape[1], 1).to(dtype)
    return fake, ((q.to(dtype) - zero) * each).to(dtype)


def bitsandbytes(nested: bool, blocksize: int = 64, **more):
    """(a parameter as bitsandbytes makes it, its numbers)."""
    q, blocks = torch.randint(16, (V, H)), V * H // 64
    packed = (q[:, ::2] << 4 | q[:, 1::2]).to(torch.uint8).reshape(-1, 1)
    state = SimpleNamespace(
        absmax=torch.rand(blocks) + 0.1, shape=torch.Size((V, H)), code=NF4, dtype=torch.float32, blocksize=blocksize,
        quant_type="nf4", nested=nested, offset=None, state2=None, **more,
    )  # fmt: skip
    scale = state.absmax
    if nested:
        state.absmax = torch.randint(256, (blocks,), dtype=torch.uint8)
        second = torch.rand(-(-blocks // 256)) + 0.1
        state.state2 = SimpleNamespace(code=torch.linspace(-1, 1, 256), absmax=second, blocksize=256)
        state.offset = torch.tensor(1.5)
        scale = state.state2.code[state.absmax.long()] * second.repeat_interleave(256)[:blocks] + 1.5
    weight = packed.as_subclass(imitation("Params4bit", "bitsandbytes.nn.modules"))
    weight.quant_state = state
    return weight, (NF4[q].view(blocks, 64) * scale[:, None]).view(V, H)


def integers(groups: int):
    return torch.randint(-127, 128, (V, H), dtype=torch.int8), torch.rand(V, groups) / 400


KNOWN = {
    "int8 by row": lambda: torchao("Int8Tensor", *integers(1)),
    "int8 by group, zero points": lambda: torchao(
        "Int8Tensor", *integers(4), torch.randint(-9, 9, (V, 4), dtype=torch.int8)
    ),
    "int8 of one scale": lambda: torchao("Int8Tensor", integers(1)[0], torch.tensor([[0.002]]), dtype=torch.float32),
    "fp8": lambda: torchao("Float8Tensor", torch.randn(V, H).to(torch.float8_e4m3fn), torch.rand(V, 1)),
    "int4 in bytes": lambda: torchao(
        "IntxUnpackedToInt8Tensor", torch.randint(-8, 8, (V, H), dtype=torch.int8), torch.rand(V, 2).bfloat16()
    ),
    "nf4": lambda: bitsandbytes(nested=False),
    "nf4, scales quantised": lambda: bitsandbytes(nested=True),
}


@pytest.mark.parametrize("name", KNOWN)
def test_numbers_to_the_bit(name):
    weight, truth = KNOWN[name]()
    found = ll.LMHead(weight).weight
    assert (found.shape, found.dtype) == (truth.shape, truth.dtype)
    assert found.nbytes < truth.numel() * 1.2
    assert torch.equal(found.dequantised(), truth)
    ids = torch.tensor([V - 1, 0, 9, 9])
    assert torch.equal(found.rows_at(ids), truth[ids])
    assert torch.equal(found[30:170].dequantised(), truth[30:170])
    assert torch.equal(found[30:].rows_at(ids[1:]), truth[30:][ids[1:]])


@pytest.mark.parametrize("name", KNOWN)
def test_every_statistic(name):
    weight, truth = KNOWN[name]()
    ops = stored(quantised(weight), truth, (5,), ranks=(2,))
    compare(ops, ALONE, top_k=3, memory_budget=200_000)


def test_stored_by_reference():
    weight, _ = KNOWN["int8 by row"]()
    assert quantised(weight).parts[0].data_ptr() == weight.qdata.data_ptr()
    weight, _ = KNOWN["nf4"]()
    assert quantised(weight).parts[0].data_ptr() == weight.data_ptr()


def odd(weight: tuple[Tensor, Tensor], **attributes):
    fake, _ = weight
    for key, value in attributes.items():
        setattr(fake, key, value)
    return fake


REFUSED = {
    "in training": (
        lambda: KNOWN["int8 by row"]()[0].requires_grad_(), ("Int8Tensor", "requires grad", "train LoRA factors"),
    ),
    "hidden states quantised too": (
        lambda: torchao("Int8Tensor", *integers(1), act_quant_kwargs="per row")[0],
        ("hidden states too (act_quant_kwargs)", "WeightOnlyConfig"),
    ),
    "scales of squares": (
        lambda: odd(KNOWN["fp8"](), block_size=[64, 64]), ("every 64 x 64", "one for each row"),
    ),
    "packed for a CPU's kernel": (
        lambda: bitsandbytes(False, packing_format_for_cpu=True)[0], ("packed anew for its own CPU kernel",),
    ),
    "blocks over rows": (lambda: bitsandbytes(False, blocksize=256)[0], ("blocks of 256", "whole blocks to a row")),
    "another layout": (
        lambda: torch.zeros(V, H).as_subclass(
            type("Int4Tensor", (Tensor,), {"__module__": "torchao.x", "__tensor_flatten__": lambda x: ([], None)})
        ),
        ("a Int4Tensor", "dequantise it first"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name):
    make, fragments = REFUSED[name]
    refused(ConfigError, lambda: ll.LMHead(make()), "LMHead: weight is ", *fragments)


def test_found_in_a_layer():
    """torchao's layers are plain ones with its tensor for a weight; bitsandbytes' have a class of their own."""
    linear = nn.Linear(H, V)
    weight, truth = KNOWN["int8 by row"]()
    del linear.weight
    linear.weight = weight
    found = ll.LMHead.of(linear)
    assert torch.equal(found.weight.dequantised(), truth)
    assert found.bias is linear.bias
    layer = imitation("Linear4bit", "bitsandbytes.nn.modules", nn.Linear)(H, V)
    weight, truth = KNOWN["nf4"]()
    del layer.weight
    layer.weight = weight
    assert torch.equal(ll.LMHead.of(layer).weight.dequantised(), truth)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif(find_spec("torchao") is None, reason="torchao is not installed: make test-quantised")
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.bfloat16, 5e-3)])
def test_real_ones_of_torchao(dtype, tolerance):
    from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig, IntxWeightOnlyConfig, quantize_
    from torchao.quantization.granularity import PerGroup, PerTensor

    configs = (
        Int8WeightOnlyConfig(), Int8WeightOnlyConfig(granularity=PerGroup(32)), Float8WeightOnlyConfig(),
        Float8WeightOnlyConfig(granularity=PerTensor()),
        IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(32)),
    )  # fmt: skip
    for config in configs:
        layer = nn.Linear(H, V, dtype=dtype)
        quantize_(nn.Sequential(layer), config)
        head = ll.LMHead.of(layer)
        truth = layer.weight.dequantize()
        assert torch.equal(head.weight.dequantised(), truth)
        compare(stored(head.weight, truth, (5,), dtype=dtype), ("logprob", "entropy"), tolerance=tolerance)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed: make test-quantised")
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_real_ones_of_bitsandbytes(kind, nested):
    import bitsandbytes as bnb

    layer = bnb.nn.Linear4bit(H, V, bias=False, compress_statistics=nested, quant_type=kind)
    layer.load_state_dict({"weight": torch.randn(V, H)})
    layer = layer.to("cpu")
    truth = bnb.functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state)
    head = ll.LMHead.of(layer)
    assert torch.equal(head.weight.dequantised(), truth)
    compare(stored(head.weight, truth, (5,)), ("logprob", "entropy"), top_k=3)
