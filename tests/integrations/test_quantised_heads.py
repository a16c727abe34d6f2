"""Models whose head torchao has quantised: the loss inside the model, and PEFT's adapters beside the head."""

from importlib.util import find_spec

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import logitless as ll
from tests.support.vocab.comparing import assert_near_in_norm

pytestmark = [
    pytest.mark.skipif(find_spec("torchao") is None, reason="torchao is not installed"),
    pytest.mark.filterwarnings("ignore"),
]
V, H = 200, 64


def quantised_model() -> LlamaForCausalLM:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    config = LlamaConfig(
        vocab_size=V, hidden_size=H, intermediate_size=96, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, head_dim=32, tie_word_embeddings=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    quantize_(model, Int8WeightOnlyConfig(), filter_fn=lambda module, name: name == "lm_head")
    return model


@pytest.mark.parametrize("lora", [False, True])
def test_the_loss_inside_the_model(lora):
    model, ids = quantised_model(), torch.randint(V, (2, 9))
    if lora:
        peft = pytest.importorskip("peft")
        model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["lm_head", "q_proj"]))
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
