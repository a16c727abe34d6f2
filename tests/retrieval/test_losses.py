"""Scores and losses of sparse documents against their dense formulas."""

import pytest
import torch
from torch.nn import functional as F

from logitless import retrieval
from logitless.errors import DtypeError, LabelError, OptionError, ShapeError
from logitless.retrieval import MaxPooled, SparseRows


def sparse(rows: int, size: int) -> SparseRows:
    """Random documents, one of them empty."""
    keep = torch.rand(rows, size) < 0.3
    keep[rows // 2] = False
    ends = F.pad(keep.sum(1).cumsum(0), (1, 0))
    values = torch.rand(int(keep.sum()), dtype=torch.float64, requires_grad=True)
    return SparseRows(ends, keep.nonzero()[:, 1], values, size)


@pytest.mark.parametrize("queries", ["dense", "sparse"])
@pytest.mark.parametrize("documents", ["dense", "sparse"])
def test_scores(queries, documents):
    sides = []
    for kind, rows in ((queries, 3), (documents, 5)):
        x = sparse(rows, 17)
        whole = torch.zeros(rows, 17, dtype=torch.float64).index_put((x.rows, x.ids), x.values)
        sides.append((x if kind == "sparse" else whole, whole, x.values))
    got = retrieval.scores(sides[0][0], sides[1][0])
    expected = sides[0][1] @ sides[1][1].T
    torch.testing.assert_close(got, expected)
    up, leaves = torch.randn_like(expected), [side[2] for side in sides]
    for a, b in zip(*(torch.autograd.grad(x, leaves, up, retain_graph=True) for x in (got, expected)), strict=True):
        torch.testing.assert_close(a, b)


def test_scores_of_queries_in_another_dtype():
    queries, documents = torch.rand(3, 17), sparse(5, 17)
    torch.testing.assert_close(retrieval.scores(queries, documents), queries @ documents.dense().float().T)


def test_flops():
    documents = sparse(6, 19)
    dense = documents.dense()
    expected = sum((dense[:, v].sum() / 6) ** 2 for v in range(19))
    for got in (retrieval.flops(documents), retrieval.flops(dense)):
        torch.testing.assert_close(got, expected)
        (grad,) = torch.autograd.grad(got, documents.values, retain_graph=True)
        torch.testing.assert_close(grad, 2 * dense.mean(0)[documents.ids] / 6)


def test_flops_of_no_document():
    nothing = SparseRows(torch.zeros(1).long(), torch.zeros(0).long(), torch.zeros(0, requires_grad=True), 19)
    for weights in (nothing, torch.zeros(0, 19, requires_grad=True)):
        retrieval.flops(weights).backward()
        assert retrieval.flops(weights) == 0


def test_in_batch_loss():
    scores = torch.randn(3, 7, dtype=torch.float64)
    p = (scores / 0.5).softmax(1)
    torch.testing.assert_close(retrieval.in_batch_loss(scores, temperature=0.5), -p.diagonal().log().mean())
    own = torch.tensor([6, 0, 3])
    torch.testing.assert_close(retrieval.in_batch_loss(scores, own, 0.5), -p[range(3), own].log().mean())
    square, tall = scores[:, :3], scores[:, :2]  # as many documents as queries, and fewer, each with its own
    torch.testing.assert_close(retrieval.in_batch_loss(square), -square.softmax(1).diagonal().log().mean())
    shared = torch.tensor([1, 0, 1])
    expected = -tall.softmax(1)[range(3), shared].log().mean()
    torch.testing.assert_close(retrieval.in_batch_loss(tall, shared), expected)
    torch.testing.assert_close(retrieval.in_batch_loss(tall, shared.to(torch.uint16)), expected)
    torch.testing.assert_close(retrieval.in_batch_loss(tall, shared, torch.tensor([1.0])), expected)
    whole = torch.compile(retrieval.in_batch_loss, fullgraph=True, backend="eager")
    torch.testing.assert_close(whole(tall, shared), expected)


def test_losses_of_a_teacher():
    a, b, c, d = torch.randn(4, 5, dtype=torch.float64)
    assert float(retrieval.margin_mse(a, b, c, d)) == pytest.approx(float(((a - b - c + d) ** 2).mean()))
    s, t = torch.randn(2, 3, 4, dtype=torch.float64)
    p = t.softmax(-1)
    expected = (p * (p.log() - s.log_softmax(-1))).sum(-1).mean()
    assert float(retrieval.distillation_kl(s, t)) == pytest.approx(float(expected))


def test_a_query_with_fewer_documents():
    s, t = torch.randn(3, 5, requires_grad=True), torch.randn(3, 5)
    fewer = torch.arange(5) >= torch.tensor([[5], [3], [1]])
    loss = retrieval.distillation_kl(s.masked_fill(fewer, -torch.inf), t.masked_fill(fewer, -torch.inf))
    expected = [retrieval.distillation_kl(s[i : i + 1, :n], t[i : i + 1, :n]) for i, n in enumerate((5, 3, 1))]
    torch.testing.assert_close(loss, sum(expected) / 3)
    (gradient,) = torch.autograd.grad(loss, s, retain_graph=True)
    torch.testing.assert_close(gradient, torch.autograd.grad(sum(expected) / 3, s)[0])


def test_a_query_without_documents_does_not_count():
    none = torch.tensor([[False], [True], [False]])
    s, t = torch.randn(3, 4, requires_grad=True), torch.randn(3, 4).masked_fill(none, -torch.inf)
    loss, others = retrieval.distillation_kl(s.masked_fill(none, -torch.inf), t), [0, 2]
    expected = retrieval.distillation_kl(s[others], t[others])
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(*(torch.autograd.grad(x, s)[0] for x in (loss, expected)))


def test_losses_of_no_query():
    """0, whose gradient is 0; a query that does not count leaves the mean to the others."""
    x, none = torch.randn(2, 3, requires_grad=True), torch.zeros(0, 3, requires_grad=True)
    of_none = [
        (retrieval.in_batch_loss(x, torch.tensor([-100, -100])), x),
        (retrieval.in_batch_loss(none), none),
        (retrieval.margin_mse(*[none[:, 0]] * 4), none),
        (retrieval.distillation_kl(none, none), none),
    ]
    for loss, leaf in of_none:
        assert loss == 0
        assert torch.equal(torch.autograd.grad(loss, leaf)[0], torch.zeros_like(leaf))
    one = retrieval.in_batch_loss(x[1:], torch.tensor([2]))
    torch.testing.assert_close(retrieval.in_batch_loss(x, torch.tensor([-100, 2])), one)


def test_activation():
    x = torch.tensor([-torch.inf, -1.0, 0.0, 2.0])
    torch.testing.assert_close(retrieval.splade_activation(x), torch.tensor([0, 0, 0, 3.0]).clamp(min=1).log())
    torch.testing.assert_close(retrieval.splade_activation(x, 2)[3], torch.tensor(3.0).log().log1p())


def test_what_is_refused():
    x = torch.zeros(3, 2)
    cases = [
        (lambda: retrieval.scores(x, torch.zeros(3, 4)), ShapeError, "of one vocabulary, got 2 and 4"),
        (lambda: retrieval.scores(x[0], x), ShapeError, r"queries: expected \(rows, vocabulary\), .* got \(2,\)"),
        (lambda: retrieval.scores(x, x[None]), ShapeError, r"documents: expected .* got \(1, 3, 2\)"),
        (lambda: retrieval.flops(x[0]), ShapeError, r"weights: expected .* got \(2,\)"),
        (lambda: retrieval.flops(MaxPooled(x, x)), ShapeError, "weights: .* a tensor or SparseRows, got MaxPooled"),
        (lambda: retrieval.in_batch_loss(x), ShapeError, r"a document for each query, got \(3, 2\)"),
        (lambda: retrieval.in_batch_loss(x[:, 0]), ShapeError, r"expected \(queries, documents\), .* got \(3,\)"),
        (lambda: retrieval.in_batch_loss(x[:, 0], torch.zeros(3).long()), ShapeError, r"got \(3,\)"),
        *(
            (lambda t=t: retrieval.in_batch_loss(x.T, temperature=t), OptionError, "temperature: expected a positive")
            for t in (0, torch.inf, "1", None, x[0])
        ),
        (
            lambda: retrieval.in_batch_loss(x.T, torch.tensor([0, 3])),
            LabelError,
            "documents in 0..2, got 3; count them",
        ),
        (
            lambda: retrieval.in_batch_loss(x.T, [0, 2]),
            DtypeError,
            "positives: expected a tensor of integers, got list",
        ),
        (
            lambda: retrieval.in_batch_loss(x.T, torch.tensor([1])),
            ShapeError,
            r"positives: expected a document for each query, \(2,\), got \(1,\); a query without one has -100",
        ),
        (lambda: retrieval.in_batch_loss(x.T, torch.tensor([-1, 2])), LabelError, "documents in 0..2, got -1; count"),
        (lambda: retrieval.margin_mse(x, x, x, x[0]), ShapeError, "margin_mse: expected four tensors of one shape"),
        (lambda: retrieval.distillation_kl(x, x[0]), ShapeError, "distillation_kl: expected scores of one shape"),
    ]
    for call, error, message in cases:
        with pytest.raises(error, match=message):
            call()
