"""NeMo Automodel's loss against its own, alone and in its recipes on two ranks; `make test-automodel` brings it."""

import importlib
import json

import pytest
import torch
from torch import nn

pytest.importorskip("nemo_automodel", reason="nemo-automodel is not installed here: make test-automodel")

from nemo_automodel.components.loss.chunked_ce import ChunkedCrossEntropy
from nemo_automodel.components.loss.masked_ce import MaskedCrossEntropy
from nemo_automodel.components.loss.mtp import calculate_mtp_loss
from nemo_automodel.components.loss.utils import calculate_loss
from nemo_automodel.components.models.common.utils import BackendConfig
from nemo_automodel.components.models.muse_glimmer.config import MuseGlimmerConfig
from nemo_automodel.components.models.muse_glimmer.model import MuseGlimmerForConditionalGeneration
from nemo_automodel.components.training.model_output_utils import get_final_hidden_states
from transformers import CohereConfig, Gemma2Config, MiniCPM3Config, MiniCPM3ForCausalLM, Qwen3Config
from transformers.models.inkling.configuration_inkling import InklingTextConfig
from transformers.models.inkling.modeling_inkling import InklingForCausalLM

from logitless.errors import ConfigError, ShapeError
from logitless.integrations import automodel as ours
from tests.support.allocations import trace_allocations
from tests.support.integrations.launching import torchrun

B, L, H, V = 2, 37, 32, 4000


class Model(nn.Module):
    """What Automodel asks of a model: its head and its configuration."""

    def __init__(self, config=None, bias=False):
        super().__init__()
        self.config, self.lm_head = config or Qwen3Config(vocab_size=V), nn.Linear(H, V, bias=bias)

    def get_output_embeddings(self):
        return self.lm_head


def batch():
    labels = torch.randint(V, (B, L))
    labels[0, :5] = -100
    return torch.randn(B, L, H), labels


def gradients(model, hidden, compute):
    hidden = hidden.clone().requires_grad_()
    model.zero_grad()
    loss = compute(hidden)
    (0.25 * loss.sum()).backward()
    return [loss.detach(), hidden.grad, model.lm_head.weight.grad.clone()]


def same(got, want):
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("count", [None, 0, 69])
@pytest.mark.parametrize("weighted", [False, True])
def test_loss_and_gradients_are_automodels_own(count, weighted):
    model, (hidden, labels) = Model(), batch()
    more = {"loss_weights": torch.rand(B, L)} if weighted else {}
    given = {"labels": labels, "model": model, "num_label_tokens": count, **more}
    losses = ours.StreamedCrossEntropy(), ChunkedCrossEntropy(chunk_len=16, compile=False)
    got, want = (
        gradients(model, hidden, lambda h, loss=loss: calculate_loss(loss, hidden_states=h, **given)) for loss in losses
    )
    same(got, want)


def test_weights_that_are_a_mask():
    hidden, labels = batch()
    given = {"labels": labels, "model": Model(), "loss_weights": torch.rand(B, L) > 0.3, "hidden_states": hidden}
    losses = ours.StreamedCrossEntropy(), ChunkedCrossEntropy(chunk_len=16, compile=False)
    got, want = (calculate_loss(loss, **given) for loss in losses)
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_reductions_masks_and_packed_batches(reduction):
    model, (hidden, labels) = Model(), batch()
    mask = torch.rand(B, L) > 0.3
    made = ours.StreamedCrossEntropy(reduction=reduction), ChunkedCrossEntropy(16, False, reduction=reduction)
    weight = model.lm_head.weight
    same(*(gradients(model, hidden, lambda h, loss=loss: loss(h, labels, weight, mask=mask)) for loss in made))
    same(*(gradients(model, hidden, lambda h, loss=loss: loss(h[:1], labels[0], weight)) for loss in made))


@pytest.mark.parametrize(
    ("config", "change"),
    [
        (Gemma2Config(vocab_size=V, final_logit_softcapping=0.5), lambda z: 0.5 * torch.tanh(z / 0.5)),
        (CohereConfig(vocab_size=V, logit_scale=0.25), lambda z: 0.25 * z),
        (Qwen3Config(vocab_size=V, unpadded_vocab_size=V - 100), lambda z: z[..., :-100]),
        (Qwen3Config(vocab_size=V, unpadded_vocab_size=V + 100), lambda z: z),
    ],
    ids=["softcap", "scale", "padding", "no padding"],
)
def test_what_the_model_makes_of_its_logits_is_found(config, change):
    """Automodel's chunked loss refuses the one and does not see the other."""
    model, (hidden, labels) = Model(config), batch()
    labels = labels.clamp(max=V - 101)
    own, streamed = MaskedCrossEntropy(), ours.StreamedCrossEntropy()
    want = gradients(model, hidden, lambda h: own(change(model.lm_head(h)), labels, num_label_tokens=69))
    given = {"labels": labels, "model": model, "num_label_tokens": 69}
    same(gradients(model, hidden, lambda h: calculate_loss(streamed, hidden_states=h, **given)), want)


def test_hidden_states_that_a_model_has_scaled_are_not_scaled_again():
    """Automodel's own Muse Glimmer hands a loss its hidden states times the multiplier of its logits."""
    shape = {"hidden_size": H, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    small = {"head_dim": 16, "intermediate_size": 64, "vocab_size": 500, "bos_token_id": 0, "eos_token_id": 1}
    logits = {"output_multiplier": 0.25, "output_soft_cap_temp": 2.0}
    config = MuseGlimmerConfig(**shape, **small, **logits, has_vision=False)
    model = MuseGlimmerForConditionalGeneration(config, BackendConfig(attn="sdpa", linear="torch", rms_norm="torch"))
    model.float()
    nn.init.normal_(model.lm_head.weight)
    ids, labels = torch.randint(500, (2, B, L))
    out = model(input_ids=ids, output_hidden_states=True)
    given = {"labels": labels, "model": model, "num_label_tokens": B * L}
    got = calculate_loss(ours.StreamedCrossEntropy(), hidden_states=get_final_hidden_states(out), **given)
    torch.testing.assert_close(got, calculate_loss(MaskedCrossEntropy(), logits=out.logits, **given))


@pytest.mark.parametrize(
    ("kind", "config", "more"),
    [
        (MiniCPM3ForCausalLM, MiniCPM3Config, {"dim_model_base": 16, "q_lora_rank": 16, "kv_lora_rank": 16}),
        (
            InklingForCausalLM,
            InklingTextConfig,
            {
                "logits_mup_width_multiplier": 3.0,
                "unpadded_vocab_size": 90,
                "swa_num_attention_heads": 2,
                "swa_num_key_value_heads": 2,
                "mlp_layer_types": ["dense", "dense"],
            },
        ),
    ],
)
def test_what_a_model_does_to_hidden_states_after_it_has_handed_them_out(kind, config, more):
    shape = {"hidden_size": H, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = kind(config(vocab_size=97, num_key_value_heads=2, initializer_range=0.3, pad_token_id=0, **shape, **more))
    ids, labels = torch.randint(90, (2, B, L))
    out = model.eval()(input_ids=ids, output_hidden_states=True, use_cache=False)
    given = {"labels": labels, "model": model, "num_label_tokens": B * L}
    got = calculate_loss(ours.StreamedCrossEntropy(), hidden_states=get_final_hidden_states(out), **given)
    torch.testing.assert_close(got, calculate_loss(MaskedCrossEntropy(), logits=out.logits, **given))


def test_multi_token_prediction():
    model, (hidden, labels) = Model(), batch()

    def loss_of(loss):
        def compute(h):
            depths = [h, 2 * h]
            return calculate_mtp_loss(loss, mtp_per_depth_h=depths, labels=labels, model=model, num_label_tokens=69)

        return gradients(model, hidden, compute)

    same(loss_of(ours.StreamedCrossEntropy()), loss_of(ChunkedCrossEntropy(16, compile=False)))


def test_memory():
    model, (hidden, labels) = Model(), batch()
    hidden.requires_grad_()

    def step(loss):
        model.zero_grad()
        given = {"labels": labels, "model": model, "logits": None, "hidden_states": hidden}
        return trace_allocations(lambda: calculate_loss(loss, **given).backward())

    gradient = V * H * 4
    assert step(ChunkedCrossEntropy(B * L, compile=False)).largest >= B * L * V * 4
    found = step(ours.StreamedCrossEntropy(memory_budget=2**16))
    assert found.largest <= gradient
    assert found.peak <= 3 * gradient + 2**16


def test_refusals():
    hidden, labels = batch()
    for words, model in (("expected no bias", Model(bias=True)), ("got Bilinear", Model())):
        if words == "got Bilinear":
            model.lm_head = nn.Bilinear(2, 2, 2)
        with pytest.raises(ConfigError, match=words):
            calculate_loss(ours.StreamedCrossEntropy(), hidden_states=hidden, labels=labels, model=model)
    for loss, error in ((ours.StreamedCrossEntropy(), ShapeError), (ChunkedCrossEntropy(16, False), ValueError)):
        with pytest.raises(error, match="mask"):
            loss(hidden, labels, Model().lm_head.weight, mask=torch.ones(L))
    with pytest.raises(ConfigError, match="expected reduction='sum', got 'mean'"):
        ours.StreamedCrossEntropy(reduction="mean")(hidden, labels, Model().lm_head.weight, num_label_tokens=3)


def test_another_automodel_is_an_error_that_names_versions(monkeypatch):
    monkeypatch.setattr(ChunkedCrossEntropy, "forward", lambda self, hidden_states: None)
    with pytest.raises(ConfigError, match=r"nemo-automodel 0\.7\S*: .*forward takes \(self, hidden_states\), expected"):
        importlib.reload(ours)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    place = tmp_path_factory.mktemp("automodel")
    torchrun("tests.support.integrations.automodel_ranks", str(place / "results.json"), at=place)
    return json.loads((place / "results.json").read_text())


PAIRS = {
    "streamed": "masked",
    "small": "chunked",
    "streamed, tied": "masked, tied",
    "streamed, softcap": "masked, softcap",
    "streamed, distilled": "masked, distilled",
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", PAIRS)
def test_recipes(results, kind):
    """Fine-tuning and distillation on two ranks under FSDP2, two passes a step: losses, gradient norms and weights."""
    got, want = results[kind], results[PAIRS[kind]]
    assert got.pop("class") == "StreamedCrossEntropy" != want["class"]
    for name, numbers in got.items():
        assert numbers == pytest.approx(want[name], rel=2e-5), name
