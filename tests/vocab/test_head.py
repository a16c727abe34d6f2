"""`LMHead.of`: the head it finds gives the module's own logits, loss and gradients, or refuses by name."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import logitless as ll
from logitless.errors import ConfigError
from logitless.vocab.reference import dense_logits

transformers = pytest.importorskip("transformers")

V, H = 37, 16
SMALL = {
    "vocab_size": V,
    "hidden_size": H,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 32,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "initializer_range": 0.5,
}
GPT2 = {"n_embd": H, "n_layer": 1, "n_head": 2, "n_positions": 32}
GRIFFIN = {"lru_width": H, "attention_window_size": 8, "block_types": ["attention"]}
MODELS = {
    "qwen3, tied": ("Qwen3Config", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", {"tie_word_embeddings": False}),
    "llama": ("LlamaConfig", {}),
    "gemma2, softcap": ("Gemma2Config", {"final_logit_softcapping": 2.0}),
    "gemma2, no softcap": ("Gemma2Config", {"final_logit_softcapping": None}),
    "gemma3, softcap": ("Gemma3TextConfig", {"final_logit_softcapping": 2.0}),
    "cohere, logit_scale": ("CohereConfig", {"logit_scale": 0.3}),
    "cohere2, logit_scale": ("Cohere2Config", {"logit_scale": 0.3}),
    "granite, logits_scaling divides": ("GraniteConfig", {"logits_scaling": 7.0}),
    "hyperclovax, logits_scaling multiplies": ("HyperCLOVAXConfig", {"logits_scaling": 7.0}),
    "phi, bias": ("PhiConfig", {}),
    "gpt2, tied": ("GPT2Config", GPT2),
    "mpt, logit_scale that its model does not apply": (
        "MptConfig",
        {"d_model": H, "n_heads": 2, "n_layers": 1, "max_seq_len": 32, "logit_scale": 0.5},
    ),
    "recurrent gemma, logits_soft_cap": ("RecurrentGemmaConfig", {**GRIFFIN, "logits_soft_cap": 2.0}),
}
# PEFT's own call of transformers.
adapted_model = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
each_model = pytest.mark.parametrize("name", MODELS)


def tiny(name: str) -> nn.Module:
    config, options = MODELS[name]
    config = getattr(transformers, config)(**{**SMALL, **options})
    model = transformers.AutoModelForCausalLM.from_config(config).double().eval()
    bias = getattr(model.get_output_embeddings(), "bias", None)
    if bias is not None:
        nn.init.normal_(bias)
    return model


def token_ids() -> torch.Tensor:
    return torch.randint(V, (2, 7))


def body(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return model.base_model(ids, use_cache=False).last_hidden_state


def assert_same(got, expected, tolerance=1e-10):
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("bias", [False, True])
def test_linear(bias):
    linear, x = nn.Linear(H, V, bias=bias), torch.randn(3, H)
    head = ll.LMHead.of(linear)
    assert head.weight is linear.weight
    assert head.bias is linear.bias
    assert (head.scale, head.softcap, head.vocab_size, head.rows, head.hidden_size) == (1.0, None, None, V, H)
    assert_same(dense_logits(x, head).float(), linear(x), 1e-5)


@each_model
def test_logits_are_the_models_own(name):
    model, ids = tiny(name), token_ids()
    with torch.no_grad():
        logits = model(ids, use_cache=False).logits
        assert logits.abs().max() > 0.1
        assert_same(dense_logits(body(model, ids), ll.LMHead.of(model)), logits)


@each_model
def test_loss_and_gradients_are_the_models_own(name):
    """Shifted by the caller; a tied embedding gets both of its gradients."""
    model, ids = tiny(name), token_ids()
    labels = ids.clone()
    labels[0, 3] = -100
    expected = model(ids, labels=labels, use_cache=False).loss
    loss = ll.linear_cross_entropy(body(model, ids)[:, :-1], ll.LMHead.of(model), labels[:, 1:])
    assert_same(loss, expected.double(), 1e-6)  # the model's own is computed in fp32
    names, parameters = zip(*((n, p) for n, p in model.named_parameters() if p.requires_grad), strict=True)
    found = torch.autograd.grad(loss, parameters, allow_unused=True)
    wanted = torch.autograd.grad(expected, parameters, allow_unused=True)
    for parameter, got, want in zip(names, found, wanted, strict=True):
        assert (got is None) == (want is None), parameter
        if got is not None:
            assert_same(got, want, 1e-5)


@each_model
def test_nothing_is_copied(name):
    model = tiny(name)
    head, linear = ll.LMHead.of(model), model.get_output_embeddings()
    assert head.weight is linear.weight
    assert head.bias is linear.bias


def test_tied_embedding():
    model = tiny("qwen3, tied")
    assert ll.LMHead.of(model).weight is model.get_input_embeddings().weight
    assert ll.LMHead.of(tiny("qwen3")).weight is not model.get_input_embeddings().weight


@pytest.mark.parametrize(
    ("config", "options", "expected"),
    [
        (
            "xLSTMConfig",
            {"num_heads": 2, "num_blocks": 1, "embedding_dim": H, "output_logit_soft_cap": 2.0},
            (1.0, 2.0),
        ),
        ("FalconH1Config", {"lm_head_multiplier": 0.3, "mamba_d_ssm": H, "mamba_n_heads": 2}, (0.3, None)),
        ("GraniteMoeConfig", {"logits_scaling": 8.0}, (1 / 8, None)),
        ("Gemma4TextConfig", {"final_logit_softcapping": 2.0}, (1.0, 2.0)),
        ("NanoChatConfig", {"final_logit_softcapping": 2.0}, (1.0, 2.0)),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_what_other_models_do_to_their_logits(config, options, expected):
    """Models too slow or too particular to run here: what their forward applies after the head."""
    with torch.device("meta"):
        config = getattr(transformers, config)(**{**SMALL, **options})
        head = ll.LMHead.of(transformers.AutoModelForCausalLM.from_config(config))
    assert (head.scale, head.softcap) == expected


@pytest.mark.parametrize("bias", [False, True])
def test_padded_vocabulary(bias):
    linear = nn.Linear(H, V + 3, bias=bias).double()
    head = replace(ll.LMHead.of(linear), vocab_size=V)
    x, labels = torch.randn(5, H, dtype=torch.float64), torch.randint(V, (5,))
    assert (head.rows, head.weight.shape[0]) == (V, V + 3)
    assert_same(dense_logits(x, head), linear(x)[:, :V])
    loss = ll.linear_cross_entropy(x, head, labels)
    expected = F.cross_entropy(linear(x)[:, :V], labels)
    assert_same(loss, expected)
    parameters = list(linear.parameters())
    found, wanted = torch.autograd.grad(loss, parameters), torch.autograd.grad(expected, parameters)
    for got, want in zip(found, wanted, strict=True):
        assert_same(got, want)
        assert got[V:].eq(0).all()


def refused(module: nn.Module, *fragments: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ll.LMHead.of(module)
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith("LMHead.of: ")
    assert all(fragment in message for fragment in fragments), message


@adapted_model
def test_body_adapters_are_fine_and_head_adapters_refused():
    peft = pytest.importorskip("peft")
    ids, linear = token_ids(), ["q_proj", "v_proj"]
    config = peft.LoraConfig(target_modules=linear, init_lora_weights=False)
    model = peft.get_peft_model(tiny("llama"), config).eval()
    base = model.base_model.model
    with torch.no_grad():
        assert_same(dense_logits(body(base, ids), ll.LMHead.of(model)), model(ids).logits)
    config = peft.LoraConfig(target_modules=[*linear, "lm_head"])
    refused(peft.get_peft_model(tiny("llama"), config), "Linear, not a plain nn.Linear", "merge its adapter")
    saved = peft.LoraConfig(target_modules=linear, modules_to_save=["lm_head"])
    refused(peft.get_peft_model(tiny("llama"), saved), "ModulesToSaveWrapper", "not a plain nn.Linear")


@adapted_model
def test_merged_adapter_is_a_plain_head_again():
    peft = pytest.importorskip("peft")
    ids = token_ids()
    config = peft.LoraConfig(target_modules=["lm_head"], init_lora_weights=False)
    adapted = peft.get_peft_model(tiny("llama"), config).eval()
    with torch.no_grad():
        logits = adapted(ids).logits
        merged = adapted.merge_and_unload()
        assert_same(dense_logits(body(merged, ids), ll.LMHead.of(merged)), logits, 1e-6)


def test_parametrized_head():
    model = tiny("llama")
    nn.utils.parametrizations.weight_norm(model.lm_head)
    refused(model, "ParametrizedLinear", "not a plain nn.Linear")
    refused(nn.utils.parametrizations.spectral_norm(nn.Linear(H, V)), "ParametrizedLinear")


def test_quantised_head():
    """What quantisers put in a model: a subclass whose weight is not what it multiplies with."""

    class Linear8bitLt(nn.Linear):
        pass

    model = tiny("llama")
    model.lm_head = Linear8bitLt(H, V)
    refused(model, "Linear8bitLt", "not a plain nn.Linear", "dequantise")
    refused(Linear8bitLt(H, V), "Linear8bitLt")


def test_modules_without_a_head():
    refused(tiny("llama").model, "LlamaModel", "no output head", "ForCausalLM")
    refused(nn.Sequential(nn.Linear(H, V)), "Sequential", "no nn.Linear", "LMHead(weight, bias)")
    refused(nn.Embedding(V, H), "Embedding")


def test_module_without_a_configuration():
    """A model of one's own with transformers' method: refused, or taken, but no AttributeError."""

    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.lm_head = nn.Linear(H, V)

        def get_output_embeddings(self):
            return self.lm_head

    own = Own()
    try:
        assert ll.LMHead.of(own).weight is own.lm_head.weight
    except ConfigError as error:
        assert "Own" in str(error)  # noqa: PT017
