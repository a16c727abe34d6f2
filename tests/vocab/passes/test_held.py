"""Tensors that a call holds itself, beside those that autograd keeps: changed before backward, they are refused."""

import pytest
import torch

import logitless as ll
from logitless import retrieval
from logitless.errors import GradientError
from logitless.sample import SamplingMask
from logitless.vocab.head.quantised import QuantisedWeight
from tests.support.vocab.quantised import blocks_of

N, H, V = 6, 5, 40
LABELS = torch.arange(N)


@pytest.fixture
def leaves():
    generator = torch.Generator().manual_seed(0)
    sizes = ((N, H), (V, H))
    return [torch.randn(*size, generator=generator, dtype=torch.float64).requires_grad_() for size in sizes]


def mask():
    return SamplingMask(torch.stack([LABELS, LABELS + 10, LABELS + 20], 1).flatten(), torch.arange(0, 3 * N + 1, 3))


def over_mask(hidden, weight):
    sets = mask()
    return ll.token_stats(hidden, ll.LMHead(weight), LABELS, sampling_mask=sets).logprob.sum(), sets.token_ids


def loss_over_mask(hidden, weight):
    sets = mask()
    loss = ll.token_loss(lambda s: -s.logprob, hidden, ll.LMHead(weight), LABELS, sampling_mask=sets)
    return loss, sets.offsets


def beside_rows(hidden, weight):
    rows = torch.randn(N, V, dtype=torch.float64)
    return ll.token_stats(hidden, ll.LMHead(weight), LABELS, want=("kl",), reference=rows).kl.sum(), rows


def beside_a_target(hidden, weight):
    target = torch.randn(100, H, dtype=torch.float64)
    head, reference = ll.LMHead(weight, token_ids=torch.arange(V)), (hidden.detach(), ll.LMHead(target))
    return ll.token_stats(hidden, head, LABELS, want=("kl",), reference=reference).kl.sum(), target


def beside_a_quantised_target(hidden, weight):
    blocks = blocks_of("Q8_0", 100, 32)[0]
    head = ll.LMHead(weight, token_ids=torch.arange(V))
    reference = torch.randn(N, 32, dtype=torch.float64), ll.LMHead(QuantisedWeight.gguf(blocks, "Q8_0"))
    return ll.token_stats(hidden, head, LABELS, want=("kl",), reference=reference).kl.sum(), blocks


@pytest.mark.parametrize(
    ("forward", "name"),
    [
        (over_mask, "sampling_mask"),
        (loss_over_mask, "sampling_mask"),
        (beside_rows, "reference"),
        (beside_a_target, "reference"),
        (beside_a_quantised_target, "reference"),
    ],
    ids=lambda x: getattr(x, "__name__", x),
)
def test_a_change_before_backward_is_refused(forward, name, leaves):
    total, held = forward(*leaves)
    first = torch.autograd.grad(total, leaves, retain_graph=True)
    assert all(g.any() for g in first)
    held.add_(1)
    with pytest.raises(GradientError, match=f"^{name}: expected its tensor .* modified in place since") as caught:
        torch.autograd.grad(total, leaves)
    assert "\n" not in str(caught.value)


def test_a_loss_whose_gradient_is_formed_already_gives_it_once(leaves):
    """And refuses to form it again from rows that have changed."""
    rows = torch.randn(N, V, dtype=torch.float64)

    def loss():
        return ll.token_loss(lambda s: s.kl, leaves[0], ll.LMHead(leaves[1]), want=("kl",), reference=rows)

    expected = torch.autograd.grad(loss(), leaves)
    total = loss()
    rows.zero_()
    for got, g in zip(torch.autograd.grad(total, leaves, retain_graph=True), expected, strict=True):
        assert torch.equal(got, g)
    with pytest.raises(GradientError, match="modified in place since"):
        torch.autograd.grad(total, leaves)


def test_offsets_of_documents_are_the_passes_own(leaves):
    hidden, weight = leaves
    offsets = torch.tensor([0, 2, N])

    def total():
        return retrieval.max_pool_logits(hidden, ll.LMHead(weight), offsets=offsets).values.sum()

    expected, pooled = torch.autograd.grad(total(), leaves), total()
    offsets.zero_()
    for got, g in zip(torch.autograd.grad(pooled, leaves), expected, strict=True):
        assert torch.equal(got, g)


@torch.inference_mode()
def rows_of_inference():
    return torch.randn(N, V, dtype=torch.float64)


def test_tensors_of_inference_mode_have_no_versions(leaves):
    hidden, weight = leaves
    stats = ll.token_stats(hidden, ll.LMHead(weight), want=("kl",), reference=rows_of_inference())
    assert all(g.any() for g in torch.autograd.grad(stats.kl.sum(), leaves))


def loss_of(hidden, head, labels, **options):
    return ll.token_loss(lambda stats: stats.kl, hidden, head, labels, want=("kl",), **options)


def sum_of(hidden, head, labels, **options):
    stats = ll.token_stats(hidden, head, labels, want=("kl", "logprob"), candidates=labels[:, None], **options)
    return stats.kl.sum() + stats.logprob.sum() + stats.candidate_logits.sum()


@pytest.mark.parametrize("compute", [sum_of, loss_of], ids=["statistics", "loss"])
def test_constants_of_inference_mode_are_kept_for_backward(leaves, compute):
    """A reference that ran under inference mode, and what else has no gradient: autograd itself refuses to keep it."""
    hidden, weight = leaves
    factors = [torch.randn(2, H, dtype=torch.float64), torch.randn(V, 2, dtype=torch.float64)]
    constants = [torch.randn(V, dtype=torch.float64), *factors, LABELS, torch.rand(N) + 1, hidden + 1, weight.detach()]

    def gradients(bias, a, b, labels, temperature, other, rows):
        head = ll.LMHead(weight, bias, adapters=(ll.LowRank(a, b),))
        total = compute(hidden, head, labels, temperature=temperature, reference=(other, ll.LMHead(rows)))
        first = torch.autograd.grad(total, leaves, retain_graph=True)
        return *first, *torch.autograd.grad(total, leaves)

    with torch.inference_mode():
        of_inference = [x.clone() for x in constants]
    for got, g in zip(gradients(*of_inference), gradients(*constants), strict=True):
        assert torch.equal(got, g)
