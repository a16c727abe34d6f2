"""What `install` leaves as it was, what it takes, and what it refuses."""

import copy
import inspect
import io
import math
import pickle
from types import SimpleNamespace

import pytest
import torch
import transformers as t
from accelerate.utils import compile_regions
from torch import nn

import logitless
from logitless.errors import DtypeError, LabelError, LogitlessError, NotFiniteError, OptionError, ShapeError
from logitless.integrations.transformers.installed import choose
from logitless.integrations.transformers.lm_head import causal_lm, forward_with, output_head, through_head
from tests.support.integrations.tiny import TINY, WIDTH, assert_same_gradients, batch_for, gradients, randomised


def tiny(**changes):
    return TINY["qwen3-tied"].build(**changes)


def installed(**options):
    model = tiny()
    logitless.install(model, **options)
    return model


def test_auto_is_dense_up_to_what_slices_may_take_on_the_device(monkeypatch):
    batch, model = batch_for(""), installed(loss="auto")
    logits = 4 * batch["labels"].numel() * 97
    for budget, dense in ((logits, True), (logits - 1, False)):
        monkeypatch.setattr("logitless.integrations.transformers.installed.default_budget", lambda _, b=budget: b)
        assert (model(**batch).logits is not None) == dense


def test_auto_is_dense_up_to_the_budget():
    assert choose("auto", 100, 100) == "dense"
    assert choose("auto", 101, 100) == "logitless"
    assert choose("dense", 10**12, 1) == "dense"
    assert choose("logitless", 1, 10**12) == "logitless"
    batch = batch_for("")
    logits = 4 * batch["labels"].numel() * 97
    assert installed(loss="auto", memory_budget=logits)(**batch).logits is not None
    assert installed(loss="auto", memory_budget=logits - 1)(**batch).logits is None
    assert installed(loss="dense")(**batch).logits is not None
    both = {"loss": "auto", "memory_budget": 4096}  # a threshold beside the budget
    assert installed(**both, threshold=logits)(**batch).logits is not None
    assert installed(**both, threshold=logits - 1)(**batch).logits is None
    with torch.autocast("cpu", torch.bfloat16):  # which the logits are then of
        assert installed(**both, threshold=logits // 2)(**batch).logits is not None
        assert installed(**both, threshold=logits // 2 - 1)(**batch).logits is None
    with pytest.raises(OptionError, match="threshold: expected a positive number of bytes or None, got 0"):
        installed(threshold=0)
    with pytest.raises(OptionError, match="memory_budget: expected a positive number of bytes or None, got True"):
        installed(memory_budget=True)


def test_a_head_whose_weight_moves_with_each_call():
    """While training, spectral_norm takes a step of its power iteration in each: as many as without us."""
    own, ours = (tiny(tie_word_embeddings=False).train() for _ in range(2))
    for model in (own, ours):
        torch.manual_seed(0)
        nn.utils.spectral_norm(model.lm_head)
    logitless.install(ours)
    batch = batch_for("")
    for _ in range(2):
        torch.testing.assert_close(ours(**batch).loss, own(**batch).loss)
        assert torch.equal(ours.lm_head.weight_u, own.lm_head.weight_u)


def in_four_bits(vocab: int, width: int) -> nn.Linear:
    """A head that looks and multiplies as bitsandbytes' own does."""
    q, code, absmax = torch.randint(16, (vocab, width)), torch.linspace(-1, 1, 16), torch.rand(vocab)
    dense = code[q] * absmax[:, None]
    forward = {"__module__": "bitsandbytes.nn.modules", "forward": lambda self, x: nn.functional.linear(x, dense)}
    layer = type("Linear4bit", (nn.Linear,), forward)(width, vocab, bias=False)
    del layer.weight
    layer.weight = (q[:, ::2] << 4 | q[:, 1::2]).to(torch.uint8).as_subclass(type("Params4bit", (torch.Tensor,), {}))
    layer.weight.quant_state = SimpleNamespace(
        shape=dense.shape, dtype=dense.dtype, code=code, absmax=absmax, blocksize=width, nested=False, quant_type="nf4"
    )
    return layer


def test_auto_counts_the_logits_of_a_head_that_is_stored_in_bytes():
    """They are as wide as hidden states, not as what four bits are packed into."""
    model, batch = tiny(tie_word_embeddings=False), batch_for("")
    model.lm_head = in_four_bits(97, 16)
    logits, losses = 4 * batch["labels"].numel() * 97, []
    for threshold, dense in ((logits, True), (logits - 1, False)):
        logitless.install(model, loss="auto", threshold=threshold)
        output = model(**batch)
        assert (output.logits is not None) == dense
        losses.append(output.loss)
    torch.testing.assert_close(*losses)


@pytest.mark.skipif(not hasattr(t, "Apertus1p5TextConfig"), reason="Apertus 1.5 is in transformers from 5.24 on")
def test_a_head_of_a_part_of_the_vocabulary():
    """Apertus 1.5 reads images' ids, too, and predicts text alone."""
    config = t.Apertus1p5TextConfig(vocab_size=97, output_vocab_size=61, **WIDTH)
    own, ours = (randomised(t.Apertus1p5TextForCausalLM(config)) for _ in range(2))
    ours.load_state_dict(own.state_dict())
    batch = batch_for("")
    batch["labels"].masked_fill_(batch["labels"] >= 61, -100)
    logitless.install(ours)
    exact, found = gradients(own, lambda: own(**batch).loss), gradients(ours, lambda: ours(**batch).loss)
    assert ours(**batch).logits is None
    assert ours(**batch).loss.item() == pytest.approx(own(**batch).loss.item(), rel=1e-5)
    assert_same_gradients(found, exact, rtol=1e-3, floor=1e-5)
    logitless.install(ours, loss="auto", memory_budget=4 * batch["labels"].numel() * 61)
    assert ours(**batch).logits is not None


def test_calls_that_ask_for_logits_are_unchanged():
    own, ours, batch = tiny().eval(), installed().eval(), batch_for("")
    ids, mask, labels = batch["input_ids"], batch["attention_mask"], batch["labels"]
    torch.testing.assert_close(ours(ids, mask).logits, own(ids, mask).logits, rtol=0, atol=0)
    kept, expected = (m(ids, mask, labels=labels[:, -4:], logits_to_keep=4) for m in (ours, own))
    torch.testing.assert_close(kept.logits, expected.logits, rtol=0, atol=0)
    assert kept.loss == expected.loss
    assert own(ids).past_key_values is not None
    assert ours(ids).past_key_values is not None
    made, expected = (m.generate(ids[:1, :4], max_new_tokens=5, do_sample=False) for m in (ours, own))
    assert made.tolist() == expected.tolist()


@pytest.mark.parametrize("given", ["positional", "embeddings", "tuple", "hidden", "cache", "shifted", "int items"])
def test_ways_to_call(given):
    own, ours, batch = tiny().eval(), installed().eval(), batch_for("")
    ids, mask, labels = batch["input_ids"], batch["attention_mask"], batch["labels"]
    if given == "positional":
        found, expected = (m(ids, mask, None, None, None, labels) for m in (ours, own))
    elif given == "embeddings":
        embeddings = own.get_input_embeddings()(ids).detach()
        found, expected = (m(inputs_embeds=embeddings, attention_mask=mask, labels=labels) for m in (ours, own))
    elif given == "tuple":
        found, expected = (m(**batch, return_dict=False, use_cache=False) for m in (ours, own))
        assert isinstance(found, tuple)
        assert len(found) == len(expected) - 1
        assert found[0].item() == pytest.approx(expected[0].item(), rel=1e-5)
        return
    elif given == "hidden":
        found, expected = (m(**batch, output_hidden_states=True, output_attentions=True) for m in (ours, own))
        assert len(found.hidden_states) == len(expected.hidden_states) == 3
        assert len(found.attentions or ()) == len(expected.attentions or ())
        torch.testing.assert_close(found.hidden_states[-1], expected.hidden_states[-1])
    elif given == "cache":
        found, expected = (m(**batch, use_cache=True) for m in (ours, own))
        assert found.past_key_values.get_seq_length() == expected.past_key_values.get_seq_length()
    elif given == "shifted":
        shifted = labels.roll(-1, 1)
        found, expected = (m(**batch, shift_labels=shifted) for m in (ours, own))
        assert abs(expected.loss.item() - own(**batch).loss.item()) > 1e-3
    else:
        found, expected = (m(**batch, num_items_in_batch=29) for m in (ours, own))
    assert found.logits is None
    assert found.loss.item() == pytest.approx(expected.loss.item(), rel=1e-5)


def test_uninstall_restores_and_install_is_idempotent():
    model = tiny()
    before, batch = dict(model.__dict__), batch_for("")
    logitless.uninstall(model)  # nothing to undo
    logitless.install(model)
    logitless.install(model, loss="dense")
    assert model(**batch).logits is not None
    logitless.install(model)
    assert model(**batch).logits is None
    logitless.uninstall(model)
    assert model.__dict__.keys() == before.keys()
    assert model.forward == type(model).forward.__get__(model)
    assert model(**batch).logits is not None
    logitless.uninstall(model)


def test_a_forward_of_the_instance_comes_back():
    model = tiny()
    calls = []

    def counting(*args, **kwargs):
        calls.append(1)
        return type(model).forward(model, *args, **kwargs)

    model.forward = counting
    logitless.install(model)
    assert model(**batch_for("")).logits is None
    assert calls == [1]
    logitless.uninstall(model)
    assert model.forward is counting


def test_switched_off_beneath_another_wrapper():
    model = installed()
    inner = model.forward
    model.forward = lambda *args, **kwargs: inner(*args, **kwargs)
    assert model(**batch_for("")).logits is None
    logitless.uninstall(model)
    assert model(**batch_for("")).logits is not None
    logitless.install(model)
    assert model(**batch_for("")).logits is None


def test_the_signature_and_names_stay():
    own, ours = tiny(), installed()
    assert inspect.signature(ours.forward) == inspect.signature(own.forward)
    assert ours.state_dict().keys() == own.state_dict().keys()
    assert type(ours) is type(own)
    assert str(ours) == str(own)


def test_copies_compute_with_their_own_weights():
    model, batch = installed(), batch_for("")
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert model(**batch).loss.item() == pytest.approx(torch.tensor(97.0).log().item())
    assert twin(**batch).logits is None
    assert twin(**batch).loss.item() == pytest.approx(tiny()(**batch).loss.item(), rel=1e-5)


def test_saved_and_loaded(tmp_path):
    model, batch = installed(), batch_for("")
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    assert loaded(**batch).logits is not None
    assert loaded(**batch).loss.item() == pytest.approx(model(**batch).loss.item(), rel=1e-5)
    buffer = io.BytesIO()
    torch.save(model, buffer, pickle_protocol=pickle.HIGHEST_PROTOCOL)
    buffer.seek(0)
    pickled = torch.load(buffer, weights_only=False)
    assert pickled(**batch).loss.item() == pytest.approx(model(**batch).loss.item(), rel=1e-5)
    logitless.install(pickled)
    assert pickled(**batch).logits is None


def test_an_error_inside_leaves_the_model_whole():
    model, batch = installed(), batch_for("")
    before, modules = model.__dict__.keys(), dict(model._modules)
    with pytest.raises(IndexError):
        model(**{**batch, "input_ids": batch["input_ids"] + 1000})  # before the head is reached
    with pytest.raises(LabelError):
        model(**{**batch, "labels": batch["labels"] + 1000})
    with pytest.raises(DtypeError, match="labels: expected integer ids in a tensor, got list"):
        model(**{**batch, "labels": batch["labels"].tolist()})
    with pytest.raises(ShapeError, match="labels"):
        model(**{**batch, "labels": batch["labels"][:, 1:]})
    model.lm_head = nn.Linear(15, 97, bias=False)
    with pytest.raises(ShapeError):
        model(**batch)
    model.lm_head = modules["lm_head"]
    assert model.__dict__.keys() == before
    assert dict(model._modules) == modules
    assert "forward" not in model.lm_head.__dict__
    assert model(**batch).loss.isfinite()


@pytest.mark.parametrize("ignored", [-100, 9])
@pytest.mark.parametrize("items", [None, 0, torch.tensor(0)])
def test_no_token_of_the_batch_counts(items, ignored):
    model, batch = installed(), batch_for("")
    batch["labels"] = torch.full_like(batch["labels"], ignored)
    with pytest.raises(LabelError, match=f"expected a token that counts, got 24 targets of {ignored};") as caught:
        model(**batch, num_items_in_batch=items, ignore_index=ignored)
    assert "\n" not in str(caught.value)
    assert model(**batch_for("")).loss.isfinite()


@pytest.mark.parametrize("name", ["num_items_in_batch", "num_items_in_batch as a tensor", "shift_labels"])
def test_no_token_of_a_part_of_the_batch_counts(name):
    """As in gradient accumulation, on one of several ranks, and of a sequence that a Trainer cuts over ranks."""
    model, batch = installed(), batch_for("")
    batch["labels"] = torch.full_like(batch["labels"], -100)
    items = torch.tensor(7) if "tensor" in name else 7
    given = {name: batch["labels"]} if name == "shift_labels" else {"num_items_in_batch": items}
    loss = model(**batch, **given).loss
    loss.backward()
    assert loss.item() == 0
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())


@pytest.mark.parametrize("empty", [0.0, math.nan])
def test_a_host_may_say_what_a_batch_without_a_token_gives(empty):
    """In training, too, where gradients go on as they were."""
    model, batch = installed(), batch_for("")
    expected = gradients(model, lambda: model(**batch).loss)
    model._logitless.empty = empty
    assert_same_gradients(gradients(model, lambda: model(**batch).loss), expected, rtol=1e-6, floor=1e-7)
    model.zero_grad()
    batch["labels"] = torch.full_like(batch["labels"], -100)
    loss = model(**batch).loss
    loss.backward()
    torch.testing.assert_close(loss, torch.tensor(empty), equal_nan=True)
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())


@pytest.mark.parametrize("items", [0, 0.0, torch.tensor(0)], ids=repr)
def test_tokens_that_nobody_counted(items):
    """A sum over none is inf, as with the model's own loss: not the mean, nor an evaluation's NaN."""
    model = installed()
    loss = model(**batch_for(""), num_items_in_batch=items).loss
    with torch.no_grad():
        assert model(**batch_for(""), num_items_in_batch=items).loss == math.inf
    logitless.uninstall(model)
    assert loss == model(**batch_for(""), num_items_in_batch=items).loss == math.inf


def test_nan_in_the_hidden_states():
    model, batch = installed(), batch_for("")
    weight = model.model.norm.weight
    was = weight[3].item()
    for hint in ("it is the first loss: load finite weights", "lower the learning rate and go back to the last"):
        with torch.no_grad():
            weight[3] = float("nan")
        with pytest.raises(NotFiniteError, match=f"got a loss of NaN from them; {hint}") as caught:
            model(**batch)
        assert "\n" not in str(caught.value)
        assert "forward" not in model.lm_head.__dict__
        with torch.no_grad():
            weight[3] = was
        assert model(**batch).loss.isfinite()


def test_a_loss_that_is_not_at_hand_is_looked_at_before_the_next():
    """On a device whose numbers the host would have to wait for."""
    from logitless.integrations.transformers.bad_batches import Watch

    class Elsewhere(torch.Tensor):
        @property
        def device(self):
            return torch.device("cuda")

    watch = Watch()
    watch.before()
    watch.after(torch.tensor(1.0).as_subclass(Elsewhere))
    watch.before()
    watch.after(torch.tensor(float("nan")).as_subclass(Elsewhere))
    with pytest.raises(NotFiniteError):
        watch.before()
    watch.before()  # said once


def test_compute_inside_the_heads_call():
    model, batch = tiny(), batch_for("")
    calls = []

    def watch(module, args):
        calls.append(args[0].shape)

    watch.__module__ = "deepspeed.runtime"  # a hook that is not known to leave the logits alone is refused
    model.lm_head.register_forward_pre_hook(watch)
    hidden = model.base_model(batch["input_ids"]).last_hidden_state
    want = logitless.token_stats(hidden, logitless.LMHead.of(model), batch["labels"]).logprob
    found = through_head(
        model, lambda head, h, labels: logitless.token_stats(h, head, labels).logprob, hidden, batch["labels"]
    )
    assert calls == [(2, 12, 16)]
    torch.testing.assert_close(found, want)
    assert "forward" not in model.lm_head.__dict__
    assert causal_lm(model) is model
    assert output_head(model) is model.lm_head


def test_another_ending():
    model, batch = installed(), batch_for("")
    hidden = forward_with(model, batch, lambda inner, hidden: (inner is model, hidden))
    assert hidden[0]
    torch.testing.assert_close(hidden[1], logitless.hidden_states(model, batch))
    assert model(**batch).logits is None


def test_hidden_states_of_something_else():
    with pytest.raises(LogitlessError, match="got Linear without"):
        logitless.hidden_states(nn.Linear(3, 4), {})


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing(reentrant):
    own, ours, batch = tiny(), installed(), batch_for("")
    ours.activation_checkpointing_enable({"use_reentrant": reentrant})
    ours.train()
    exact, found = gradients(own, lambda: own(**batch).loss), gradients(ours, lambda: ours(**batch).loss)
    assert_same_gradients(found, exact, rtol=1e-3, floor=1e-5)


def test_autocast():
    own, ours, batch = tiny(), installed(), batch_for("")
    with torch.autocast("cpu", torch.bfloat16):
        expected, found = own(**batch).loss, ours(**batch).loss
    assert found.item() == pytest.approx(expected.item(), rel=2e-3)
    exact, found = gradients(own, lambda: expected), gradients(ours, lambda: found)
    assert_same_gradients(found, exact, rtol=0, floor=2**-5)


@pytest.mark.slow
@pytest.mark.compiled
@pytest.mark.parametrize("name", ["qwen3-tied", "gemma2-softcap", "phi-bias"])
def test_compiled(name):
    own, ours, batch = TINY[name].build(), TINY[name].build(), batch_for("")
    logitless.install(ours, memory_budget=2**12)
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
    exact = gradients(own, lambda: own(**batch).loss)
    found = gradients(ours, lambda: compiled(**batch).loss)
    assert_same_gradients(found, exact, rtol=1e-3, floor=1e-5)


COMPILED_PARTS = {
    "the model in place": lambda model: model.compile(backend="eager"),
    "the head in place": lambda model: model.lm_head.compile(backend="eager"),
    "the head": lambda model: setattr(model, "lm_head", torch.compile(model.lm_head, backend="eager")),
    "accelerate's regions": lambda model: compile_regions(model, backend="eager"),
}


@pytest.mark.compiled
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo looks at its input
@pytest.mark.parametrize("part", COMPILED_PARTS)
def test_compiled_in_part(part):
    """What runs in the place of the head or of the model is not what torch.compile made of them."""
    own, ours, batch = tiny(), tiny(), batch_for("")
    ours = COMPILED_PARTS[part](ours) or ours
    logitless.install(ours)
    own(**batch).loss.backward()
    found = ours(**batch)
    found.loss.backward()
    assert found.logits is None
    for name in ("embed_tokens", "norm"):
        expected, got = (getattr(model.model, name).weight.grad for model in (own, ours))
        torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-5)
    text = {name: batch[name] for name in ("input_ids", "attention_mask")}
    expected, got = (logitless.score(model, text).logprob.nan_to_num() for model in (own, ours))
    torch.testing.assert_close(got, expected)
    expected, got = (logitless.hidden_states(model, text) for model in (own, ours))
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(ours(**text).logits, own(**text).logits)
    logitless.uninstall(ours)
    assert ours(**batch).logits is not None


@pytest.mark.compiled
def test_generation_of_a_model_compiled_in_place():
    own, ours, text = tiny().eval(), tiny().eval(), {"input_ids": batch_for("")["input_ids"]}
    ours.compile(backend="eager")
    expected = own.generate(**text, max_new_tokens=4, do_sample=False)
    assert torch.equal(logitless.generate(ours, text, max_new_tokens=4, do_sample=False).ids, expected)
