"""Masked language models: the model's own loss and gradients, from its labelled tokens alone."""

import pytest
import torch
import transformers
from datasets import Dataset

import logitless
from logitless.errors import ConfigError, LabelError
from tests.support.allocations import trace_allocations
from tests.support.integrations.masked import MASKED, WIDTH, dense_masked_loss, masked_batch
from tests.support.integrations.tiny import assert_same_gradients, gradients
from tests.support.vocab.measuring import measure

each = pytest.mark.parametrize("name", MASKED)


@each
@pytest.mark.parametrize("items", [None, 3])
def test_loss_and_gradients_are_the_models_own(name, items):
    """items: what a Trainer counted; those that take the mean themselves do not look at it."""
    batch = masked_batch(name)
    if items is not None:
        batch["num_items_in_batch"] = torch.tensor(items)
    for dtype, rounding in ((torch.float64, 1e-7), (torch.float32, 1e-4)):
        own, ours = MASKED[name].build().to(dtype), MASKED[name].build().to(dtype)
        if dtype == torch.float64:
            own.loss_function = dense_masked_loss
        logitless.install(ours, memory_budget=2**12)
        exact, found = (gradients(m, lambda m=m: 3 * m(**batch).loss) for m in (own, ours))
        assert ours(**batch).loss.item() == pytest.approx(own(**batch).loss.item(), rel=rounding)
        assert_same_gradients(found, exact, rtol=10 * rounding, floor=rounding)


@each
def test_the_rest_of_the_output_is_the_models_own(name):
    batch = masked_batch(name)
    own, ours = MASKED[name].build().eval(), MASKED[name].build().eval()
    logitless.install(ours)
    with torch.no_grad():
        expected, found = (m(**batch, output_hidden_states=True) for m in (own, ours))
        as_tuple = ours(**batch, return_dict=False)
        logits = [m(batch["input_ids"], batch["attention_mask"]).logits for m in (own, ours)]
    assert found.logits is None
    assert type(found) is type(expected)
    assert set(found) == set(expected) - {"logits"}
    torch.testing.assert_close(found.hidden_states, expected.hidden_states)
    assert as_tuple[0].item() == found.loss.item()
    assert torch.equal(*logits)
    logitless.uninstall(ours)
    assert ours(**batch).logits is not None


@each
def test_no_logits_in_memory_and_products_of_labelled_tokens_only(name):
    vocab, rows, length = 4096, 8, 48
    batch = masked_batch(name, vocab, rows, length)
    size = 4 * rows * length * vocab
    labelled = int((batch["labels"] >= 0).sum())
    model = MASKED[name].build(vocab)
    logitless.install(model, memory_budget=2**18)

    def step():
        model.zero_grad(set_to_none=True)
        model(**batch).loss.backward()

    step()  # also checks what the model does to its logits
    streamed = trace_allocations(step)
    assert streamed.largest <= size / 16
    body = measure(lambda: logitless.hidden_states(model, batch).sum().backward()).flops
    width = model.get_output_embeddings().in_features
    assert measure(step).flops - body == pytest.approx(3 * 2 * labelled * vocab * width, rel=0.02)


@each
def test_hidden_states_are_what_the_head_eats(name):
    batch, model = masked_batch(name), MASKED[name].build().eval()
    batch.pop("labels")
    head = logitless.LMHead.of(model)
    with torch.no_grad():
        hidden = logitless.hidden_states(model, batch)
        torch.testing.assert_close(hidden @ head.weight.T + head.bias, model(**batch).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("name", ["bert", "modernbert", "xlm-roberta"])
def test_trainer(name, smoothing, tmp_path):
    """Steps and evaluation, with gradient accumulation over parts of which one has no labelled token."""
    rows = {k: x.tolist() for k, x in masked_batch(name, rows=8).items()}
    losses = []
    for streamed in (False, True):
        model = MASKED[name].build()
        arguments = transformers.TrainingArguments(
            tmp_path / str(streamed), per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=3,
            logging_steps=1, learning_rate=1e-2, report_to=[], use_cpu=True, save_strategy="no",
            label_smoothing_factor=smoothing,
        )  # fmt: skip
        trainer = transformers.Trainer(
            model, arguments, train_dataset=Dataset.from_dict(rows), eval_dataset=Dataset.from_dict(rows)
        )
        if streamed:
            logitless.install(trainer)
        trainer.train()
        losses.append([x["loss"] for x in trainer.state.log_history if "loss" in x] + [trainer.evaluate()["eval_loss"]])
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


def test_ligers_kernels_are_taken_where_it_has_no_forward(tmp_path):
    arguments = transformers.TrainingArguments(tmp_path, report_to=[], use_cpu=True, use_liger_kernel=True)
    logitless.install(transformers.Trainer(MASKED["bert"].build(), arguments))


@pytest.mark.parametrize("name", ["bert", "modernbert-sparse"])
def test_metrics_of_a_trainer(name, tmp_path):
    """Each label's own position says them: nothing is shifted."""
    batch = masked_batch(name, rows=4)
    labels = batch["labels"].masked_fill(batch["labels"] < 0, -100)
    model = MASKED[name].build().eval()
    logp = model(batch["input_ids"], batch["attention_mask"]).logits.log_softmax(-1).detach()
    valid = labels >= 0
    expected = torch.where(valid, logp.gather(-1, labels.clamp(min=0)[..., None])[..., 0], 0.0)
    rows = Dataset.from_dict({k: x.tolist() for k, x in batch.items()})
    arguments = transformers.TrainingArguments(
        tmp_path, per_device_eval_batch_size=2, report_to=[], use_cpu=True, disable_tqdm=True
    )
    trainer = transformers.Trainer(model, arguments, eval_dataset=rows)
    logitless.install(trainer)
    found = trainer.predict(rows)
    torch.testing.assert_close(torch.tensor(found.predictions["logprob"]), expected, rtol=1e-4, atol=1e-4)
    assert found.metrics["test_accuracy"] == pytest.approx(
        float((logp.argmax(-1) == labels)[valid].float().mean()), abs=1e-6
    )
    assert found.metrics["test_perplexity"] == pytest.approx(float((-expected[valid].mean()).exp()), rel=1e-4)


def test_a_part_without_labelled_tokens():
    batch = masked_batch("bert")
    batch["labels"] = torch.full_like(batch["labels"], -100)
    model = MASKED["bert"].build()
    logitless.install(model)
    with pytest.raises(LabelError, match="labels: expected a token that counts"):
        model(**batch)
    loss = model(**batch, num_items_in_batch=7).loss
    loss.backward()
    assert loss.item() == 0
    assert not any(p.grad.any() for p in model.parameters() if p.grad is not None)
    with torch.no_grad():  # an evaluation goes on, with the loss of transformers'
        assert all(model(**batch, **given).loss.isnan() for given in ({}, {"num_items_in_batch": 0}))
        assert model(**batch, num_items_in_batch=7).loss == 0


def test_auto_is_dense_where_the_logits_fit():
    batch = masked_batch("bert")
    logits = 4 * batch["labels"].numel() * 97
    for threshold, dense in ((logits, True), (logits - 1, False)):
        model = MASKED["bert"].build()
        logitless.install(model, loss="auto", threshold=threshold)
        assert (model(**batch).logits is not None) == dense


def test_another_loss_is_refused():
    model = MASKED["modernbert"].build()
    model.loss_function = torch.nn.functional.cross_entropy
    with pytest.raises(ConfigError, match="loss is cross_entropy, expected transformers' ForMaskedLMLoss"):
        logitless.install(model)
    assert model.forward == type(model).forward.__get__(model)


def mobilebert():
    sizes = {"hidden_size": 16, "embedding_size": 8, "intra_bottleneck_size": 16, "num_hidden_layers": 1}
    config = transformers.MobileBertConfig(vocab_size=97, num_attention_heads=2, intermediate_size=24, **sizes)
    return transformers.MobileBertForMaskedLM(config)


def esm():
    return transformers.EsmForMaskedLM(transformers.EsmConfig(vocab_size=97, mask_token_id=3, **WIDTH))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (mobilebert, "MobileBertForMaskedLM joins two matrices into its head"),
        (esm, "EsmForMaskedLM adds a bias that is not its head's"),
    ],
)
def test_heads_of_more_than_a_matrix_and_its_bias_are_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        logitless.install(make())
