"""`multi_token_cross_entropy`: the K depths' losses and gradients of whole logits, at the price of one call."""

import inspect
import textwrap
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import logitless as ll
from logitless.errors import BackendError, DtypeError, LabelError, OptionError, ShapeError
from logitless.multi_token import multi_token_cross_entropy
from tests.support.allocations import trace_allocations
from tests.support.vocab.measuring import measure

K, B, T, H, V = 3, 2, 9, 8, 29
WEIGHTS = (1.0, 0.5, -0.25)


def make_head(**options) -> ll.LMHead:
    return ll.LMHead(nn.Parameter(torch.randn(V, H, dtype=torch.float64)), **options)


def make_batch() -> tuple[list[torch.Tensor], torch.Tensor]:
    """Each depth's hidden states, and labels of which some do not count."""
    torch.manual_seed(0)
    hiddens = [torch.randn(B, T, H, dtype=torch.float64, requires_grad=True) for _ in range(K)]
    labels = torch.randint(V, (B, T))
    labels[0, 4], labels[1, :3] = -100, -100
    return hiddens, labels


def dense_logits(hidden: torch.Tensor, head: ll.LMHead) -> torch.Tensor:
    z = head.scale * F.linear(hidden, head.weight_tensor, head.bias)[..., : head.rows]
    return head.softcap * torch.tanh(z / head.softcap) if head.softcap else z


def dense(hiddens, heads, labels, weights=WEIGHTS, first=1) -> tuple[torch.Tensor, torch.Tensor]:
    each = []
    for k, (hidden, head) in enumerate(zip(hiddens, heads, strict=True)):
        z, targets = dense_logits(hidden[:, : T - first - k], head), labels[:, first + k :]
        each.append(F.cross_entropy(z.flatten(0, -2), targets.flatten()))
    return torch.stack(each) @ torch.tensor(weights, dtype=each[0].dtype), torch.stack(each)


def gradients(loss: torch.Tensor, hiddens, heads) -> list[torch.Tensor]:
    leaves = {id(x): x for x in (*hiddens, *(head.weight_tensor for head in heads))}
    return list(torch.autograd.grad(0.7 * loss, list(leaves.values())))


def one_for_all() -> list[ll.LMHead]:
    return [make_head(softcap=3.0, scale=0.5, bias=torch.randn(V, dtype=torch.float64), vocab_size=V - 2)] * K


def one_each() -> list[ll.LMHead]:
    return [make_head() for _ in range(K)]


def two_that_share() -> list[ll.LMHead]:
    first, second = make_head(), make_head()
    return [first, second, first]


@pytest.mark.parametrize("first", [0, 1, torch.tensor(2)])
def test_the_documented_dense_equivalent_is_one(first):
    hiddens, labels = make_batch()
    head = make_head()
    _, _, code = inspect.getdoc(multi_token_cross_entropy).partition("Dense equivalent:\n\n")
    names = {"F": F, "T": T, "first": first, "labels": labels, "weights": WEIGHTS}
    names["logits"] = [dense_logits(hidden, head) for hidden in hiddens]
    exec(textwrap.dedent(code.partition("\n\n")[0]), names)
    loss, each = multi_token_cross_entropy(hiddens, head, labels, weights=WEIGHTS, first=first)
    torch.testing.assert_close(each, torch.stack(names["each"]).detach())
    torch.testing.assert_close(loss, names["loss"])


@pytest.mark.parametrize("first", [0, 1, 2])
@pytest.mark.parametrize("heads_of", [one_for_all, one_each, two_that_share])
def test_losses_and_gradients_are_those_of_whole_logits(heads_of, first, backend):
    hiddens, labels = make_batch()
    heads = heads_of()
    labels = labels.clamp(max=heads[0].rows - 1)
    expected, means = dense(hiddens, heads, labels, first=first)
    found = multi_token_cross_entropy(hiddens, heads, labels, weights=WEIGHTS, first=first, backend=backend)
    torch.testing.assert_close(found.loss, expected)
    torch.testing.assert_close(found.each, means)
    assert not found.each.requires_grad
    for own, right in zip(gradients(found.loss, hiddens, heads), gradients(expected, hiddens, heads), strict=True):
        torch.testing.assert_close(own, right)


def test_one_tensor_and_one_head_are_as_a_list_of_each():
    hiddens, labels = make_batch()
    head, stacked = make_head(), torch.stack(hiddens).detach().requires_grad_()
    loss, each = multi_token_cross_entropy(stacked, head, labels)
    expected, means = dense(hiddens, [head] * K, labels, weights=(1.0, 1.0, 1.0))
    torch.testing.assert_close((loss, each), (expected, means))
    torch.testing.assert_close(
        torch.autograd.grad(loss, stacked)[0], torch.stack(torch.autograd.grad(expected, hiddens))
    )


@pytest.mark.parametrize("ahead", [0, 20], ids=["from their starts", "cut out of their middles"])
def test_a_label_of_another_document_does_not_count(ahead):
    hiddens, labels = make_batch()
    head, starts = make_head(), (0, 2, 7, T)
    positions = torch.cat([torch.arange(end - a) + ahead * a for a, end in pairwise(starts)]).expand(B, T)
    found = multi_token_cross_entropy(hiddens, head, labels, position_ids=positions, denominator=1.0)
    alone = [
        multi_token_cross_entropy([x[:, a:b] for x in hiddens], head, labels[:, a:b], denominator=1.0)
        for a, b in pairwise(starts)
    ]
    torch.testing.assert_close(found.loss, sum(part.loss for part in alone))
    torch.testing.assert_close(found.each, sum(part.each for part in alone))


def test_a_depth_past_the_end_is_zero_with_a_live_graph():
    hiddens, labels = make_batch()
    head = make_head()
    found = multi_token_cross_entropy(hiddens, head, labels, first=T - 1)
    last = dense_logits(hiddens[0][:, 0], head)
    torch.testing.assert_close(found.each[0], F.cross_entropy(last, labels[:, -1]))
    assert found.each[1:].tolist() == [0, 0]
    one = multi_token_cross_entropy(hiddens, head, labels.index_fill(0, torch.tensor(1), -100), first=T - 1)
    torch.testing.assert_close(one.each[0], F.cross_entropy(last[:1], labels[:1, -1]))
    nothing = multi_token_cross_entropy(hiddens, head, labels, first=T)
    assert nothing.loss == 0
    assert all(not x.any() for x in gradients(nothing.loss, hiddens, [head]))


@pytest.mark.parametrize("denominator", [12, 1e40, torch.tensor(12)])
def test_a_denominator_divides_each_depths_sum(denominator):
    hiddens, labels = make_batch()
    head = make_head()
    means = multi_token_cross_entropy(hiddens, head, labels).each
    counts = torch.stack([(labels[:, 1 + k :] != -100).sum() for k in range(K)])
    found = multi_token_cross_entropy(hiddens, head, labels, weights=WEIGHTS, denominator=denominator)
    torch.testing.assert_close(found.each, means * counts / denominator)
    torch.testing.assert_close(found.loss, found.each.detach() @ torch.tensor(WEIGHTS, dtype=means.dtype))


def test_a_denominator_in_float64_leaves_the_losses_in_float32():
    hiddens, labels = torch.randn(K, B, T, H), torch.randint(V, (B, T))
    head = ll.LMHead(torch.randn(V, H))
    means = multi_token_cross_entropy(hiddens, head, labels).each
    found = multi_token_cross_entropy(hiddens, head, labels, denominator=torch.tensor(B * T, dtype=torch.float64)).each
    torch.testing.assert_close(found, means * torch.tensor([T - 1 - k for k in range(K)]) / T)


def test_an_id_that_is_ignored_is_a_token_of_no_depth():
    """Also an id of the vocabulary: then neither its tokens nor their number count."""
    hiddens, labels = make_batch()
    head = make_head()
    ignored = int(labels[0, 3])
    expected = multi_token_cross_entropy(hiddens, head, labels.masked_fill(labels == ignored, -100))
    found = multi_token_cross_entropy(hiddens, head, labels.where(labels != -100, ignored), ignore_index=ignored)
    torch.testing.assert_close(found, expected)


def test_a_shared_head_pays_three_products_of_the_labelled_tokens_and_one_gradient():
    n, h, v = 128, 16, 2048
    head = ll.LMHead(nn.Parameter(torch.randn(v, h)))
    hiddens, labels = torch.randn(K, 1, n, h, requires_grad=True), torch.randint(v, (1, n))

    def step():
        multi_token_cross_entropy(hiddens, head, labels, memory_budget=100_000).loss.backward()
        hiddens.grad = head.weight_tensor.grad = None

    tokens = sum(n - 1 - k for k in range(K))
    seen = measure(step, memory=True)
    assert seen.flops == pytest.approx(3 * 2 * tokens * h * v, rel=0.02)
    assert seen.largest <= v * h * 4  # the head's gradient; one depth's logits are 8 times that
    assert seen.peak <= 2 * v * h * 4 + 8 * K * n * h * 4 + 2 * 100_000
    kept = trace_allocations(lambda: multi_token_cross_entropy(hiddens, head, labels)).kept
    assert kept <= v * h * 4 + 2 * K * n * h * 4  # for backward: one gradient of the head, not one a depth


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo's own look
def test_under_torch_compile():
    hiddens, labels = make_batch()
    head = make_head()

    def step(hiddens, labels):
        loss, each = multi_token_cross_entropy(hiddens, head, labels, weights=WEIGHTS)
        return 2 * loss, each

    expected, found = step(hiddens, labels), torch.compile(step, backend="eager")(hiddens, labels)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(gradients(found[0], hiddens, [head]), gradients(expected[0], hiddens, [head]))


def test_half_precision_operands_give_fp32_losses():
    hiddens, labels = make_batch()
    head = ll.LMHead(torch.randn(V, H, dtype=torch.bfloat16))
    rounded = [hidden.detach().bfloat16() for hidden in hiddens]
    found = multi_token_cross_entropy(rounded, head, labels)
    exact = ll.LMHead(head.weight_tensor.double())
    expected, means = dense([x.double() for x in rounded], [exact] * K, labels, weights=(1.0, 1.0, 1.0))
    assert found.loss.dtype == found.each.dtype == torch.float32
    torch.testing.assert_close((found.loss, found.each), (expected.float(), means.float()))


def test_depths_of_unlike_precision():
    """Each is computed in its own, and all are added up in the widest."""
    hiddens, labels = make_batch()
    heads = one_each()
    dtypes = torch.bfloat16, torch.float64, torch.float32
    unlike = [x.detach().to(dtype) for x, dtype in zip(hiddens, dtypes, strict=True)]
    found = multi_token_cross_entropy(unlike, heads, labels)
    expected, means = dense([x.double() for x in unlike], heads, labels, weights=(1.0, 1.0, 1.0))
    assert found.loss.dtype == found.each.dtype == torch.float64
    torch.testing.assert_close((found.loss, found.each), (expected, means), rtol=1e-5, atol=0)


def test_what_does_not_fit_is_one_clear_line():
    hiddens, labels = make_batch()
    head = make_head()
    for count in (2, 4):
        with pytest.raises(ShapeError, match=f"one LMHead for all depths or 3, one for each, got {count}"):
            multi_token_cross_entropy(hiddens, [head] * count, labels)
    for wrong in (nn.Linear(H, V), [nn.Linear(H, V)] * 3, [head, head, nn.Linear(H, V)]):
        with pytest.raises(DtypeError, match="or one for each depth, got Linear"):
            multi_token_cross_entropy(hiddens, wrong, labels)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ShapeError, match="at least one depth"):
        multi_token_cross_entropy([], head, labels)
    with pytest.raises(ShapeError, match=r"at depth 1, got \(2, 8, 8\) beside labels \(2, 9\)"):
        multi_token_cross_entropy([hiddens[0], hiddens[1][:, 1:]], head, labels)
    with pytest.raises(ShapeError, match=r"at depth 2, got \(2, 8, 8\) beside labels \(2, 9\)"):
        multi_token_cross_entropy([*hiddens[:2], hiddens[2][:, 1:]], head, labels)
    with pytest.raises(ShapeError, match=r"labels: expected .*, the tokens of sequences, got a single number"):
        multi_token_cross_entropy([torch.randn(H)], head, torch.tensor(1))
    with pytest.raises(ShapeError, match=r"position_ids: expected labels' shape, got \(9,\)"):
        multi_token_cross_entropy(hiddens, head, labels, position_ids=torch.arange(T))
    for wrong, got in ((torch.rand(B, T), "torch.float32"), (labels > 3, "torch.bool"), (labels.tolist(), "list")):
        with pytest.raises(DtypeError, match=f"position_ids: expected whole numbers in a tensor, got {got}"):
            multi_token_cross_entropy(hiddens, head, labels, position_ids=wrong)
    with pytest.raises(BackendError, match=r"backend: .*'nothing'"):
        multi_token_cross_entropy(hiddens, head, labels, backend="nothing")
    others = [(1.0, 1.0, x) for x in (None, "1", float("nan"), 10**400)]
    for weights in ((1.0, 2.0), 0.3, "abc", "123", *others):
        with pytest.raises(OptionError, match=r"weights: expected a number finite in torch\.float64 .*, 3 in all, got"):
            multi_token_cross_entropy(hiddens, head, labels, weights=weights)  # pyright: ignore[reportArgumentType]
    with pytest.raises(OptionError, match=r"finite in torch\.float32 for each depth, 1 in all, got \(1e\+39,\)"):
        multi_token_cross_entropy([hiddens[0].float()], head, labels, weights=(1e39,))
    for wrong in (None, "a", 1.5, 2**70):
        with pytest.raises(OptionError, match=f"ignore_index: expected an integer of 64 bits, got {wrong!r}"):
            multi_token_cross_entropy(hiddens, head, labels, ignore_index=wrong)  # pyright: ignore[reportArgumentType]
    for first in (-1, True, 1.0):
        with pytest.raises(OptionError, match=f"first: expected a whole number of at least 0, got {first}"):
            multi_token_cross_entropy(hiddens, head, labels, first=first)
    with pytest.raises(OptionError, match="denominator: expected a positive number"):
        multi_token_cross_entropy(hiddens, head, labels, denominator=0)
    with pytest.raises(LabelError):
        multi_token_cross_entropy(hiddens, head, labels.clamp(min=0) + V)
    for wrong in (labels + 0.6, labels > 3, labels.to(torch.complex64), labels.tolist()):
        with pytest.raises(DtypeError, match=r"labels: expected integer ids, got (torch\.|list)"):
            multi_token_cross_entropy(hiddens, head, wrong)


def test_narrow_integers():
    hiddens, weight = torch.randn(2, 1, 8, 4), torch.randn(200, 4)
    labels, places = torch.randint(200, (1, 8)), torch.arange(8)[None]
    heads = [ll.LMHead(weight)] * 2
    wide = multi_token_cross_entropy(hiddens, heads, labels, position_ids=places)
    narrow = multi_token_cross_entropy(hiddens, heads, labels.to(torch.uint8), position_ids=places.to(torch.uint8))
    assert torch.equal(narrow.loss, wide.loss)
