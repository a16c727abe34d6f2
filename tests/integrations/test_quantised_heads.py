"""Models whose head torchao or bitsandbytes has quantised: the loss inside the model, PEFT's adapters beside the head.

`make test-quantised` brings both.
"""

from importlib.util import find_spec

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import logitless as ll
from tests.support.vocab.comparing import assert_near_in_norm

pytestmark = pytest.mark.filterwarnings("ignore")
V, H = 200, 64


def of_torchao(model: LlamaForCausalLM) -> None:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    quantize_(model, Int8WeightOnlyConfig(), filter_fn=lambda module, name: name == "lm_head")


def of_bitsandbytes(model: LlamaForCausalLM) -> None:
    from bitsandbytes.nn import Linear4bit

    layer = Linear4bit(H, V, bias=False, compute_dtype=torch.float32, quant_type="nf4")
    layer.load_state_dict({"weight": model.lm_head.weight.detach()})
    model.lm_head = layer.to("cpu")
    model.is_loaded_in_4bit = True  # as from_pretrained says it, by which PEFT takes its own layer for such weights


PACKAGES = {"torchao": of_torchao, "bitsandbytes": of_bitsandbytes}


def quantised_model(package: str) -> LlamaForCausalLM:
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed: make test-quantised")
    config = LlamaConfig(
        vocab_size=V, hidden_size=H, intermediate_size=96, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, head_dim=32, tie_word_embeddings=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    PACKAGES[package](model)
    return model


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize("lora", [False, True])
def test_the_loss_inside_the_model(lora, package):
    model, ids = quantised_model(package), torch.randint(V, (2, 9))
    if lora:
        peft = pytest.importorskip("peft")
        model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["lm_head", "q_proj"]))
        assert ("bnb" in type(model.get_base_model().lm_head).__module__) == (package == "bitsandbytes")
        torch.nn.init.normal_(model.get_base_model().lm_head.lora_B.default.weight)
    trained = [x for x in model.parameters() if x.requires_grad]
    dense = model(input_ids=ids, labels=ids).loss
    wanted = torch.autograd.grad(dense, trained, allow_unused=True)
    ll.install(model)
    output = model(input_ids=ids, labels=ids)
    assert output.logits is None
    torch.testing.assert_close(output.loss, dense)
    assert ll.LMHead.of(model).weight.nbytes < V * H * 1.2
    for got, want in zip(torch.autograd.grad(output.loss, trained, allow_unused=True), wanted, strict=True):
        assert (got is None) == (want is None)
        if got is not None:
            assert_near_in_norm(got, want.double(), 1e-4, floor=1e-7)
