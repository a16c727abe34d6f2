"""`LMHead.of`: the head it finds gives the module's own logits, loss and gradients, or refuses by name."""

from copy import deepcopy
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import logitless as ll
from logitless.errors import ConfigError
from logitless.vocab.reference import dense_logits
from tests.support.vocab.heads import MODELS, SMALL, H, V, assert_same, body, refused, tiny, token_ids

transformers = pytest.importorskip("transformers")
each_model = pytest.mark.parametrize("name", MODELS)


@pytest.mark.parametrize("bias", [False, True])
def test_linear(bias):
    linear, x = nn.Linear(H, V, bias=bias), torch.randn(3, H)
    head = ll.LMHead.of(linear)
    assert head.weight is linear.weight
    assert head.bias is linear.bias
    assert (head.scale, head.softcap, head.vocab_size, head.rows, head.hidden_size) == (1.0, None, None, V, H)
    assert_same(dense_logits(x, head).float(), linear(x), 1e-5)


def test_what_is_printed_of_a_head_is_what_was_found():
    low_rank = ll.LowRank(torch.zeros(2, H), torch.zeros(V, 2), scaling=0.5)
    head = replace(ll.LMHead.of(nn.Linear(H, V)), softcap=30.0, adapters=(low_rank,))
    adapter = f"LowRank(a=(2, {H}), b=({V}, 2), scaling=0.5)"
    assert repr(head) == f"LMHead(weight=({V}, {H}), bias=({V},), softcap=30.0, adapters=({adapter},))"


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


def test_a_copy_of_a_split_head_is_of_the_same_group():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        shard = ll.VocabShard(torch.distributed.group.WORLD, 0, V)
        head, hidden = ll.LMHead(torch.randn(V, H), shard=shard), torch.randn(3, H)
        copied = deepcopy(head)
        assert copied.shard.process_group is shard.process_group
        head.weight.zero_()
        found = ll.linear_cross_entropy(hidden, copied, torch.arange(3))
        assert_same(found, F.cross_entropy(hidden @ copied.weight.T, torch.arange(3)), 1e-5)
    finally:
        torch.distributed.destroy_process_group()


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
