"""The loss inside the model: equal to the model's own, and without logits."""

import pytest
import torch

from logitless.errors import LabelError, ShapeError
from logitless.train.loss import choose, hook
from logitless.train.model import with_adapters
from tests.support import largest_allocation
from tests.train.micro import micro_model


def batch(rows: int = 2, length: int = 16) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 259, (rows, length), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[0, :3] = -100
    return {"input_ids": ids, "labels": labels}


def test_auto_is_dense_up_to_the_budget():
    assert choose("auto", 100, 100) == "dense"
    assert choose("auto", 101, 100) == "chunked"
    assert choose("dense", 10**12, 1) == "dense"
    assert choose("chunked", 1, 10**12) == "chunked"


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("items", [None, 37, torch.tensor(37)])
def test_equals_the_models_own(tied, items):
    own, ours = micro_model(tie_word_embeddings=tied), micro_model(tie_word_embeddings=tied)
    hook(ours, "chunked", 2**12)
    extra = {} if items is None else {"num_items_in_batch": items}
    expected, found = own(**batch(), **extra).loss, ours(**batch(), **extra).loss
    assert found.item() == pytest.approx(expected.item(), rel=2e-6)
    (3 * expected).backward()
    (3 * found).backward()
    for name, parameter in ours.named_parameters():
        exact = own.get_parameter(name).grad
        torch.testing.assert_close(parameter.grad, exact, rtol=1e-4, atol=1e-5 * float(exact.abs().max()), msg=name)


def test_makes_no_logits():
    """16 × 64 tokens, 8192 entries: 32 MiB of logits; the largest tensor is the gradient of the head, 1 MiB."""
    shape = {"vocab_size": 8192, "hidden_size": 32}
    inputs = batch(16, 64)
    largest = {}
    for method in ("chunked", "dense"):
        model = micro_model(**shape)
        hook(model, method, 2**20)
        largest[method] = largest_allocation(lambda model=model: model(**inputs).loss.backward())
    assert largest["chunked"] <= 2**20
    assert largest["dense"] >= 2**25


def test_without_labels_the_model_is_itself():
    own, ours = micro_model().eval(), micro_model().eval()
    hook(ours, "chunked", 2**12)
    ids = batch()["input_ids"]
    torch.testing.assert_close(ours(ids).logits, own(ids).logits)
    made = ours.generate(ids[:1, :4], max_new_tokens=3, do_sample=False, pad_token_id=0)
    assert made.tolist() == own.generate(ids[:1, :4], max_new_tokens=3, do_sample=False, pad_token_id=0).tolist()


def test_through_adapters():
    own, ours = (with_adapters(micro_model(), 2) for _ in range(2))
    ours.load_state_dict(own.state_dict())
    hook(ours, "chunked", 2**12)
    expected, found = own(**batch()).loss, ours(**batch()).loss
    assert found.item() == pytest.approx(expected.item(), rel=2e-6)
    expected.backward()
    found.backward()
    trained = [(n, p) for n, p in ours.named_parameters() if p.requires_grad]
    assert trained
    for name, parameter in trained:
        torch.testing.assert_close(parameter.grad, own.get_parameter(name).grad, rtol=1e-4, atol=1e-6, msg=name)


def test_a_batch_of_ignored_tokens_is_zero():
    model = micro_model()
    hook(model, "chunked", 2**12)
    inputs = batch()
    loss = model(inputs["input_ids"], labels=torch.full_like(inputs["labels"], -100)).loss
    loss.backward()
    assert loss.item() == 0


def test_bad_labels_and_heads_are_typed_errors():
    model = micro_model()
    hook(model, "chunked", 2**12)
    inputs = batch()
    inputs["labels"][1, 5] = 259
    with pytest.raises(LabelError):
        model(**inputs)
    model.lm_head = torch.nn.Linear(31, 259, bias=False)
    with pytest.raises(ShapeError):
        model(**batch())
