"""The fused forward against TRL's: every field, on every kind of head, with each of its settings and inputs."""

from dataclasses import fields

import pytest
import torch
from trl.trainer.utils import FusedCausalLMOutput, add_fused_lm_head

from logitless.errors import ConfigError, NotFiniteError, OptionError
from logitless.integrations.trl.contract import settings_of
from logitless.integrations.trl.forward import STATISTIC_OF, Fused, TokenOutput
from logitless.integrations.trl.scores import Wanted
from tests.support.integrations.tiny import TINY, batch_for, halved
from tests.support.integrations.trl.runs import same

OUTPUTS = tuple(STATISTIC_OF)
HEADS = (
    "qwen3-tied",
    "gemma2-softcap",
    "cohere-scale",
    "granite-scaling",
    "phi-bias",
    "qwen3-moe",
    "deepseek-v2",  # its own output has no aux_loss, which TRL computes
    "gemma3-vision",
)
INPUTS = ("labels", "shifted labels", "counted elsewhere", "nothing counts", "packed")
FIELDS = [field.name for field in fields(FusedCausalLMOutput)]


def on_the_pass(model, extra=(), top_k=0, **how):
    """The fused forward in the place of TRL's, without a trainer."""
    settings = settings_of(model.forward)
    names = tuple(dict.fromkeys(("logprob", *(STATISTIC_OF[name] for name in settings.outputs), *extra)))
    fused = Fused(model.forward, settings, Wanted(names, settings.temperature, top_k, **how), on=True)
    model.forward = fused.method(model)
    return model


def both(name, outputs=OUTPUTS, **settings):
    theirs = TINY[name].build().float()
    ours = same(theirs)
    for model in (theirs, ours):
        add_fused_lm_head(model, outputs=outputs, **settings)
    return on_the_pass(ours), theirs


def batch_of(kind, name="qwen3-tied"):
    batch = batch_for(name)
    if kind == "shifted labels":
        batch["shift_labels"] = torch.nn.functional.pad(batch.pop("labels"), (0, 1), value=-100)[:, 1:].contiguous()
    if kind == "counted elsewhere":
        batch["num_items_in_batch"] = torch.tensor(37)
    if kind == "nothing counts":
        batch["labels"] = batch["labels"].fill_(-100)
    if kind == "packed":
        ids, labels = batch["input_ids"].reshape(1, -1), batch["labels"].reshape(1, -1)
        n = ids.shape[1] // 2
        ends = torch.tensor([0, n, 2 * n], dtype=torch.int32)
        batch = {"input_ids": ids, "labels": labels, "position_ids": torch.arange(n).repeat(2)[None]}
        batch |= {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": n, "max_length_k": n}
    return batch


def assert_same_output(ours, theirs):
    assert isinstance(ours, FusedCausalLMOutput)
    for name in FIELDS:
        mine, other = getattr(ours, name), getattr(theirs, name)
        assert (mine is None) == (other is None), name
        if other is None:
            continue
        assert (mine.shape, mine.dtype) == (other.shape, other.dtype), name
        torch.testing.assert_close(
            mine.detach(), other.detach(), rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
        )
        assert mine.requires_grad == other.requires_grad, name


def assert_same_gradients(ours, theirs, loss):
    results = []
    for model in (ours, theirs):
        model.zero_grad()
        loss(model).backward()
        results.append({name: p.grad for name, p in model.named_parameters()})
    for name, exact in results[1].items():
        assert (results[0][name] is None) == (exact is None), name
        if exact is not None:
            torch.testing.assert_close(
                results[0][name], exact, rtol=1e-3, atol=2e-5 * max(1.0, exact.abs().max().item())
            )


@pytest.mark.parametrize("name", HEADS)
def test_every_head(name):
    ours, theirs = both(name, temperature=0.8)
    batch = batch_for(name)
    assert_same_output(ours(**batch, fused_lm_head=True), theirs(**batch, fused_lm_head=True))
    weight = torch.randn(batch["labels"].shape[0], batch["labels"].shape[1] - 1)

    def loss(model):
        out = model(**batch, fused_lm_head=True)
        return (weight * out.log_probs).sum() + (weight.flip(0) * out.entropy).sum() + out.loss

    assert_same_gradients(ours, theirs, loss)


@pytest.mark.parametrize("kind", INPUTS)
def test_every_kind_of_input(kind):
    ours, theirs = both("qwen3-tied")
    batch = batch_of(kind)
    assert_same_output(ours(**batch, fused_lm_head=True), theirs(**batch, fused_lm_head=True))
    assert_same_gradients(ours, theirs, lambda model: model(**batch, fused_lm_head=True).loss)


@pytest.mark.parametrize("field", OUTPUTS)
def test_only_what_was_asked_for_is_there(field):
    ours, theirs = both("llama", outputs=("log_probs", field))
    batch = batch_for("llama")
    assert_same_output(ours(**batch, fused_lm_head=True), theirs(**batch, fused_lm_head=True))


def test_the_fp32_head_of_a_bf16_model():
    """Under autocast the head stays in fp32, as cast_lm_head_to_fp32 promises."""
    ours, theirs = both("llama", cast_lm_head_to_fp32=True)
    batch = batch_for("llama")
    with torch.autocast("cpu", torch.bfloat16):
        found, exact = ours(**batch, fused_lm_head=True), theirs(**batch, fused_lm_head=True)
    assert_same_output(found, exact)


def test_other_calls_are_the_models_own():
    ours, theirs = both("llama")
    batch = batch_for("llama")
    for kwargs in ({}, {"labels": batch["labels"]}, {"logits_to_keep": 2}):
        inputs = {name: x for name, x in batch.items() if name != "labels"} | kwargs
        found, exact = ours(**inputs), theirs(**inputs)
        torch.testing.assert_close(found.logits, exact.logits)
        if "labels" in kwargs:
            torch.testing.assert_close(found.loss, exact.loss)
    ids = batch["input_ids"][:1, :4]
    mask = torch.ones_like(ids)
    generated = [m.generate(ids, attention_mask=mask, max_new_tokens=5, do_sample=False) for m in (ours, theirs)]
    torch.testing.assert_close(*generated)


def test_what_trl_lacks():
    model = TINY["llama"].build()
    add_fused_lm_head(model, temperature=0.7)
    on_the_pass(model, extra=("logsumexp", "self_certainty"), top_k=3)
    batch = batch_for("llama")
    out = model(**batch, fused_lm_head=True)
    assert isinstance(out, TokenOutput)
    counted = out.label_mask
    z = model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1].double() / 0.7
    lse = z.logsumexp(-1)
    certainty = lse - z.mean(-1) - torch.tensor(z.shape[-1]).log()
    for found, exact in ((out.logsumexp, lse), (out.self_certainty, certainty)):
        torch.testing.assert_close(found, exact.masked_fill(~counted, 0).float(), rtol=1e-5, atol=1e-5)
    assert torch.equal(out.top_k_ids[counted], z.topk(3).indices[counted])


def test_nan_in_the_hidden_states():
    ours, _ = both("llama")
    with torch.no_grad():
        ours.model.norm.weight[3] = float("nan")
    with pytest.raises(NotFiniteError, match="hidden states: expected finite numbers, got a loss of NaN"):
        ours(**batch_for("llama"), fused_lm_head=True)


def test_a_model_that_changes_its_logits_in_a_way_of_its_own():
    model = TINY["llama"].build()
    add_fused_lm_head(model)
    on_the_pass(halved(model))
    for _ in range(2):
        with pytest.raises(ConfigError, match="LlamaForCausalLM changes its logits otherwise than by scale 1"):
            model(**batch_for("llama"), fused_lm_head=True)


def test_a_call_for_a_tuple_keeps_the_loss_of_the_experts():
    ours, theirs = both("qwen3-moe")
    batch = batch_for("qwen3-moe")
    found, expected = ours(**batch, fused_lm_head=True, return_dict=False), theirs(**batch, fused_lm_head=True)
    torch.testing.assert_close(found.aux_loss, expected.aux_loss)


def test_labels_are_needed():
    ours, _ = both("llama")
    with pytest.raises(OptionError, match="labels"):
        ours(batch_for("llama")["input_ids"], fused_lm_head=True)
