"""Every kind of head: loss and gradients as transformers computes them, and no tensor of logits' size."""

import pytest
import torch

import logitless
from tests.support.allocations import trace_allocations
from tests.support.integrations.tiny import TINY, assert_same_gradients, batch_for, dense_loss, gradients

each = pytest.mark.parametrize("name", TINY)


@each
def test_loss_and_gradients_are_the_models_own(name):
    """In float64, where the dense loss is not rounded to float32."""
    batch = batch_for(name)
    own, ours = TINY[name].build().double(), TINY[name].build().double()
    own.loss_function = dense_loss
    batch = {k: x.double() if x.is_floating_point() else x for k, x in batch.items()}
    logitless.install(ours, memory_budget=2**12)
    exact = gradients(own, lambda: 3 * own(**batch).loss)
    found = gradients(ours, lambda: 3 * ours(**batch).loss)
    assert ours(**batch).loss.item() == pytest.approx(own(**batch).loss.item(), rel=1e-7)
    assert_same_gradients(found, exact, rtol=1e-6, floor=1e-7)


@each
def test_loss_in_float32(name):
    """transformers as it comes, with Trainer's count of items."""
    batch = {**batch_for(name), "num_items_in_batch": torch.tensor(31)}
    own, ours = TINY[name].build(), TINY[name].build()
    logitless.install(ours)
    exact, found = gradients(own, lambda: own(**batch).loss), gradients(ours, lambda: ours(**batch).loss)
    assert ours(**batch).loss.item() == pytest.approx(own(**batch).loss.item(), rel=1e-5)
    assert_same_gradients(found, exact, rtol=1e-3, floor=1e-5)


@each
def test_the_rest_of_the_output_is_the_models_own(name):
    batch = batch_for(name)
    own, ours = TINY[name].build().eval(), TINY[name].build().eval()
    logitless.install(ours)
    with torch.no_grad():
        expected, found = own(**batch, use_cache=False), ours(**batch, use_cache=False)
    assert found.logits is None
    assert type(found) is type(expected)
    assert set(found) == set(expected) - {"logits"}
    if "aux_loss" in expected:
        assert found.aux_loss.item() == pytest.approx(expected.aux_loss.item())
        assert expected.aux_loss.item() > 0.1


@each
def test_no_logits_in_memory(name):
    """384 tokens' and 2048 entries' product is nowhere, forward or backward; the dense path shows it can be seen."""
    vocab, rows, length = 2048, 8, 48
    batch = batch_for(name, vocab, rows, length)
    size = 4 * rows * length * vocab
    model = TINY[name].build(vocab)
    dense = trace_allocations(lambda: model(**batch).loss.backward())
    model.zero_grad(set_to_none=True)
    logitless.install(model, memory_budget=2**18)
    for _ in range(2):  # the first call also checks what the model does to its logits
        model.zero_grad(set_to_none=True)
        streamed = trace_allocations(lambda: model(**batch).loss.backward())
    assert dense.largest >= size
    assert streamed.largest <= size / 16
    assert streamed.peak <= dense.peak - 1.5 * size


@each
def test_hidden_states_are_what_the_head_eats(name):
    batch = batch_for(name)
    model = TINY[name].build().eval()
    with torch.no_grad():
        hidden = logitless.hidden_states(model, batch)
        logits = model.get_output_embeddings()(hidden)
        labels = batch.pop("labels")
        expected = model(**batch).logits
    assert hidden.shape == (*labels.shape, 16)
    head = logitless.LMHead.of(model)
    logits = head.scale * logits
    logits = head.softcap * torch.tanh(logits / head.softcap) if head.softcap else logits
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
