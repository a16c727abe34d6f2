"""`LMHead.of` under PEFT: its own layers' logits, loss and gradients, or a refusal by name."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import logitless as ll
from logitless.vocab.reference import dense_logits
from tests.support.vocab.heads import H, V, assert_same, body, refused, tiny, token_ids

peft = pytest.importorskip("peft")
pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),  # PEFT's own call
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning"),
]


def lora(**options):
    defaults = {"r": 4, "lora_alpha": 6, "target_modules": ["lm_head", "q_proj"], "init_lora_weights": False}
    return peft.LoraConfig(**{**defaults, **options})


def adapted(name="llama", **options):
    return peft.get_peft_model(tiny(name).float(), lora(**options)).double()  # some initialise in fp32 only


def loss_of(model, ids, labels, **options):
    hidden = body(model.get_base_model(), ids)
    targets = F.pad(labels[:, 1:], (0, 1), value=-100)
    return ll.linear_cross_entropy(hidden, ll.LMHead.of(model), targets, **options)


def batch():
    ids = token_ids()
    labels = ids.clone()
    labels[0, 3] = -100
    return ids, labels


def dense_loss(model, ids, labels):
    logits = model(ids, use_cache=False).logits[:, :-1]
    return F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())


def gradients(model, loss):
    parameters = [p for p in model.parameters() if p.requires_grad]
    return torch.autograd.grad(loss, parameters, allow_unused=True)


def check(model, tolerance=1e-10):
    """Logits, loss and the gradient of every trained parameter are those of the model's own forward."""
    ids, labels = batch()
    if not model.training:
        with torch.no_grad():
            logits = model(ids, use_cache=False).logits
            assert_same(dense_logits(body(model.get_base_model(), ids), ll.LMHead.of(model)), logits, tolerance)
    torch.manual_seed(4)
    expected = dense_loss(model, ids, labels)
    torch.manual_seed(4)
    loss = loss_of(model, ids, labels)
    assert_same(loss, expected, tolerance)
    assert loss.requires_grad == expected.requires_grad
    if not loss.requires_grad:
        return
    for got, want in zip(gradients(model, loss), gradients(model, expected), strict=True):
        assert (got is None) == (want is None)
        if want is not None:
            assert_same(got, want, tolerance)


LORAS = {
    "plain": {},
    "rank-stabilised": {"use_rslora": True},
    "head alone": {"target_modules": ["lm_head"]},
    "other scalings": {"rank_pattern": {"lm_head": 7}, "alpha_pattern": {"lm_head": 3}},
    "pissa": {"init_lora_weights": "pissa_niter_4"},
    "on the weight itself": {"target_modules": ["q_proj"], "target_parameters": ["lm_head.weight"]},
}
each_model = pytest.mark.parametrize(
    "name", ["llama", "gemma2, softcap", "cohere, logit_scale", "granite, logits_scaling divides", "phi, bias"]
)


@each_model
def test_the_heads_own_transforms_stay(name):
    check(adapted(name).eval())


@pytest.mark.parametrize("name", LORAS)
def test_every_lora(name):
    model = adapted(**LORAS[name]).eval()
    assert len(ll.LMHead.of(model).adapters) == 1
    check(model)


def test_the_factors_are_the_layers_own():
    model = adapted(use_rslora=True).eval()
    layer, (adapter,) = model.base_model.model.lm_head, ll.LMHead.of(model).adapters
    assert adapter.a is layer.lora_A["default"].weight
    assert adapter.b is layer.lora_B["default"].weight
    assert adapter.scaling == layer.scaling["default"] == 6 / 2
    assert ll.LMHead.of(model).weight is layer.base_layer.weight
    assert ll.LMHead.of(layer).adapters[0].a is adapter.a


def test_dropout_while_training():
    """PEFT's mask from the same seed, in value and gradient; none in evaluation."""
    model = adapted(lora_dropout=0.4, target_modules=["lm_head"]).train()
    assert ll.LMHead.of(model).adapters[0].dropout == 0.4
    check(model)
    ids, labels = batch()
    with torch.no_grad():
        assert not torch.allclose(loss_of(model, ids, labels), loss_of(model, ids, labels))
    model.eval()
    assert ll.LMHead.of(model).adapters[0].dropout == 0
    check(model)


def test_trained_base_weight():
    """The full head trained together with its adapter."""
    model = adapted().eval()
    model.base_model.model.lm_head.base_layer.weight.requires_grad_(True)
    check(model)


@pytest.mark.filterwarnings("ignore:`lora_bias=True` was passed but the targeted layer")
@pytest.mark.parametrize("name", ["phi, bias", "llama"])
def test_lora_bias(name):
    model = adapted(name, target_modules=["lm_head"], lora_bias=True).eval()
    nn.init.normal_(model.base_model.model.lm_head.lora_B["default"].bias)
    check(model)


def test_several_adapters():
    model = adapted().eval()
    model.add_adapter("other", lora(r=2, lora_alpha=5, target_modules=["lm_head"]))
    model.add_adapter("body only", lora(target_modules=["q_proj"]))
    model.double()
    for active, count in ((["default", "other"], 2), (["other", "body only"], 1), (["body only"], 0), (["default"], 1)):
        model.base_model.set_adapter(active)
        assert len(ll.LMHead.of(model).adapters) == count
        check(model)


def test_disabled_and_merged():
    model, (ids, _) = adapted().eval(), batch()
    plain, own = tiny("llama"), model(ids).logits
    with model.disable_adapter():
        assert ll.LMHead.of(model).adapters == ()
        check(model)
    model.merge_adapter()
    assert ll.LMHead.of(model).adapters == ()
    check(model)
    assert_same(model(ids).logits, own, 1e-8)
    with model.disable_adapter():  # PEFT's forward unmerges here
        assert_same(ll.LMHead.of(model).weight, plain.lm_head.weight, 1e-8)
        assert not model.base_model.model.lm_head.merged
    check(model)


def test_modules_to_save():
    model = adapted(target_modules=["q_proj"], modules_to_save=["lm_head"]).eval()
    nn.init.normal_(model.base_model.model.lm_head.modules_to_save["default"].weight)
    assert ll.LMHead.of(model).weight is model.base_model.model.lm_head.modules_to_save["default"].weight
    check(model)
    with model.disable_adapter():
        assert ll.LMHead.of(model).weight is model.base_model.model.lm_head.original_module.weight
        check(model)


@pytest.mark.parametrize(
    "options",
    [
        {"target_modules": ["embed_tokens"]},
        {"target_modules": ["embed_tokens"], "ensure_weight_tying": True},
        {"target_modules": ["lm_head"]},
        {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
        {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
    ],
    ids=str,
)
def test_tied_embeddings(options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT about what tying means
        model = adapted("qwen3, tied", **options).eval()
    check(model)


def test_under_other_wrappers():
    model = adapted().eval()
    wrappers = (nn.DataParallel, torch.compile, checkpoint_wrapper, peft.PeftModel.get_base_model)
    for wrapped in (wrap(model) for wrap in wrappers):
        assert ll.LMHead.of(wrapped).adapters[0].a is ll.LMHead.of(model).adapters[0].a
    assert ll.LMHead.of(torch.compile(nn.Linear(H, V))).rows == V
    inner = model.base_model.model
    inner.lm_head = torch.compile(inner.lm_head)
    assert len(ll.LMHead.of(model).adapters) == 1
    prefix = peft.get_peft_model(tiny("llama"), peft.PrefixTuningConfig("CAUSAL_LM", num_virtual_tokens=2))
    assert ll.LMHead.of(prefix).weight is prefix.base_model.lm_head.weight


def test_sharded_modules_are_known_beneath_their_mixin():
    """fully_shard and replicate change a module's class in place."""

    class FSDPModule:
        pass

    def shard(module):
        kind = type(module)
        module.__class__ = type(f"FSDP{kind.__name__}", (FSDPModule, kind), {})

    model = adapted().eval()
    layer = model.base_model.model.lm_head
    for module in (layer.base_layer, layer.lora_A["default"], layer, model.base_model.model):
        shard(module)
    check(model)
    assert len(ll.LMHead.of(layer).adapters) == 1


@pytest.mark.compiled
def test_compiled_with_its_lookup():
    """A compiled function may look the head up itself."""
    layer = adapted(target_modules=["lm_head"]).base_model.model.lm_head.eval()
    x, labels = torch.randn(6, H, dtype=torch.float64, requires_grad=True), torch.randint(V, (6,))

    def loss(x):
        return ll.linear_cross_entropy(x, ll.LMHead.of(layer), labels)

    torch._dynamo.reset()
    got, expected = torch.compile(loss, fullgraph=True, backend="aot_eager")(x), loss(x)
    leaves = [x, layer.lora_A["default"].weight, layer.lora_B["default"].weight]
    assert_same(got, expected)
    for g, w in zip(torch.autograd.grad(got, leaves), torch.autograd.grad(expected, leaves), strict=True):
        assert_same(g, w)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_half_precision_is_nearer_to_the_truth_than_the_layers_own(dtype):
    """PEFT keeps a bf16 model's factors in fp32; its sum is rounded to bf16, ours is not."""
    model = peft.get_peft_model(tiny("llama").to(dtype), lora()).eval()
    assert model.base_model.model.lm_head.lora_A["default"].weight.dtype == torch.float32
    ids, labels = batch()
    hidden, head = body(model.get_base_model(), ids).detach(), ll.LMHead.of(model)
    exact = dense_logits(hidden, head).log_softmax(-1).gather(-1, ids[..., None])[..., 0].detach()
    ours = ll.token_stats(hidden, head, ids).logprob.detach()
    assert_same(ours.double(), exact, 2e-5)
    own = model.base_model.model.lm_head(hidden).float().log_softmax(-1).gather(-1, ids[..., None])[..., 0]
    assert (ours - exact).abs().max() <= (own - exact).abs().max() + 1e-6
    grads = gradients(model, loss_of(model, ids, labels))
    assert all(g.dtype == torch.float32 for g in grads if g is not None)


@pytest.mark.filterwarnings("ignore:Unsloth")
@pytest.mark.parametrize(
    ("options", "fragment"),
    [
        ({"use_dora": True}, "DoraLinearVariant"),
        ({"alora_invocation_tokens": [1]}, "ALoraLinearVariant"),
        ({"init_lora_weights": "mica"}, "MiCALinearVariant"),
    ],
    ids=str,
)
def test_lora_variants_are_refused(options, fragment):
    model = peft.get_peft_model(tiny("llama").float(), lora(**options, task_type="CAUSAL_LM"))
    refused(model, fragment, "'default'", "not plain LoRA", "merge its adapter")
    refused(model.base_model.model.lm_head, fragment)
    with model.disable_adapter():
        assert ll.LMHead.of(model).adapters == ()


@pytest.mark.parametrize(
    ("config", "fragment"),
    [
        (lambda: peft.LoHaConfig(target_modules=["lm_head"]), "peft.tuners.loha.layer.Linear"),
        (lambda: peft.LoKrConfig(target_modules=["lm_head"]), "peft.tuners.lokr.layer.Linear"),
        (lambda: peft.OFTConfig(target_modules=["lm_head"], oft_block_size=4), "peft.tuners.oft.layer.Linear"),
        (
            lambda: peft.IA3Config(target_modules=["lm_head"], feedforward_modules=[], task_type="CAUSAL_LM"),
            "peft.tuners.ia3.layer.Linear",
        ),
        (
            lambda: peft.AdaLoraConfig(target_modules=["lm_head"], total_step=10, task_type="CAUSAL_LM"),
            "peft.tuners.adalora.layer.SVDLinear",
        ),
        (lambda: peft.VeraConfig(target_modules=["lm_head"]), "peft.tuners.vera.layer.Linear"),
    ],
    ids=["loha", "lokr", "oft", "ia3", "adalora", "vera"],
)
def test_other_tuners_are_refused(config, fragment):
    refused(peft.get_peft_model(tiny("llama"), config()), fragment, "not a plain nn.Linear", "merge its adapter")


def test_trained_tokens_of_a_tied_head_are_refused():
    model = adapted("qwen3, tied", target_modules=["q_proj"], trainable_token_indices=[1, 2])
    refused(model, "TrainableTokensWrapper")


def test_a_layer_that_is_not_quite_loras():
    model = adapted(lora_dropout=0.1)
    layer = model.base_model.model.lm_head
    layer.lora_dropout["default"] = nn.AlphaDropout(0.1)
    refused(model, "AlphaDropout")
    layer.lora_dropout["default"], layer.lora_A["default"] = nn.Identity(), nn.Bilinear(2, 2, 2)
    refused(model, "Bilinear")


def test_merged_adapter_is_a_plain_head_again():
    model, ids = adapted(target_modules=["lm_head"]).eval(), token_ids()
    with torch.no_grad():
        logits = model(ids).logits
        merged = model.merge_and_unload()
        assert_same(dense_logits(body(merged, ids), ll.LMHead.of(merged)), logits, 1e-6)
