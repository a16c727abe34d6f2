"""Statistics over sampling masks: a kernel's program for each entry reads its token's row, and nothing is gathered."""

from unittest.mock import patch

import torch
import torch.nn.functional as F

import logitless as ll
from logitless.sample import SamplingMask
from logitless.vocab.backends import rows as plain
from logitless.vocab.backends.triton import rows, sets
from logitless.vocab.backends.triton.sets import look_at
from logitless.vocab.call.sampling_mask import Places
from logitless.vocab.passes import kept
from tests.support.plain import halved, over, slow
from tests.support.vocab.comparing import EVERYTHING, operands
from tests.support.vocab.triton_calls import check

N, H, V = 7, 40, 301


def mask_around(labels: torch.Tensor) -> SamplingMask:
    """One to 30 entries of each token, in any order, its label among them."""
    return SamplingMask.of(
        [[(label + 7 * j) % V for j in range(1 + 5 * i % 30)] for i, label in enumerate(labels.tolist())]
    )


def sets_of(labels: torch.Tensor, sizes: tuple[int, ...]) -> SamplingMask:
    """Sets of these sizes in turn, each with its label somewhere, in any order."""
    sets = []
    for i, label in enumerate(labels.tolist()):
        size = sizes[i % len(sizes)]
        chosen = [label, *(j for j in torch.randperm(V).tolist() if j != label)][:size]
        sets.append([chosen[j] for j in torch.randperm(size).tolist()])
    return SamplingMask.of(sets)


@halved
@over("want", {"log-prob": ("logprob",), "more": ("logprob", "entropy", "self_certainty", "max_logit", "sum_sq_prob")})
@over("form", {"plain": {"bias": False}, "bias and softcap": {"softcap": 5.0}, "lora": {"ranks": (2,), "bias": False}})
def test_statistics_and_gradients(want, form, device):
    ops = operands((N,), H, V, **form)
    check(device, ops, want, sampling_mask=mask_around(ops.labels).to(device), temperature=torch.rand(N) + 0.5)


@halved
@over("sizes", {"one block": (1, 64), "several": (65, 2, 140)})
@over("form", {"plain": {"bias": False}, "softcap": {"softcap": 5.0}})
def test_every_statistic_beside_a_reference(sizes, form, device):
    ops = operands((N,), H, V, reference=True, **form)
    mask = sets_of(ops.labels, sizes)
    check(device, ops, EVERYTHING, sampling_mask=mask.to(device), temperature=torch.rand(N) + 0.5, jsd_beta=0.3)


def test_what_both_heads_like_comes_last(device):
    """So that KL's sums are measured from another difference after every block."""
    ops = operands((N,), H, V, reference=True)
    with torch.no_grad():
        liked = sum(F.linear(x.hidden, x.weight, x.bias) for x in (ops, ops.ref)).argsort(1)
    ops.labels = liked[:, -1].clone()
    mask = SamplingMask.of([row[-2 if i % 3 else -140 :].tolist() for i, row in enumerate(liked)])
    check(device, ops, ("kl", "reverse_kl"), sampling_mask=mask.to(device))


@over("sizes", {"one block": (1, 40), "several": (65, 140)}, slow=["one block"])
def test_logits_of_minus_infinity_in_many_blocks(sizes, device):
    ops = operands((N,), H, V)
    with torch.no_grad():
        ops.bias[::3] = -torch.inf
        ops.bias[ops.labels] = 0.1
    check(device, ops, ("logprob", "entropy", "rank"), sampling_mask=sets_of(ops.labels, sizes).to(device))


def test_without_labels(device):
    ops = operands((N,), H, V)
    mask = sets_of(ops.labels, (1, 70, 3))
    ops.labels = None
    check(device, ops, ("logsumexp", "entropy"), sampling_mask=mask.to(device))


def test_tokens_that_are_ignored_and_none_at_all(device):
    ops = operands((N,), H, V)
    mask = mask_around(ops.labels)
    ops.labels[2:4] = -100
    check(device, ops, ("logprob", "entropy"), sampling_mask=mask.to(device))
    ops.labels[:] = -100
    check(device, ops, ("logprob", "entropy"), sampling_mask=mask.to(device))


def test_a_mask_whose_tensors_are_columns_of_others(device):
    ops = operands((N,), H, V)
    mask = mask_around(ops.labels).to(device)
    columns = (torch.stack([x, torch.zeros_like(x)], 1)[:, 0] for x in (mask.token_ids, mask.offsets))
    check(device, ops, ("logprob", "entropy"), sampling_mask=SamplingMask(*columns))


@halved
@over("budget", {"one chunk": None, "several": 20_000})
@over("form", {"plain": {"bias": False}, "bias, softcap and lora": {"softcap": 5.0, "ranks": (2,)}})
@over("columns", {"": False, "in columns": True})
def test_a_gradient_of_one_chunk_is_rounded_once(columns, budget, form, device):
    """In the head's own dtype: no sum in fp32 beside it, which several chunks need, and whatever lies in columns."""
    ops = operands((N,), H, V, dtype=torch.bfloat16, **form).training("weight").on(device)
    if columns:
        ops.weight = ops.weight.detach().t().contiguous().t().requires_grad_()
    options = {"sampling_mask": mask_around(ops.labels).to(device), "memory_budget": budget, "backend": "triton"}
    exact = ops.to(torch.float64)
    of_exact = ll.token_stats(exact.hidden, exact.head, exact.labels, **options | {"backend": "eager"})
    (true,) = torch.autograd.grad(of_exact.logprob.sum(), exact.weight)
    with patch.object(kept, "scatter_one_hots", wraps=kept.scatter_one_hots) as scattered:
        stats = ll.token_stats(ops.hidden, ops.head, ops.labels, **options)
        (found,) = torch.autograd.grad(stats.logprob.sum(), ops.weight)
    added = bool(budget) or columns
    assert ll.explain(ops.hidden, ops.head, ops.labels, **options).gradient_bytes == V * H * (6 if added else 2)
    summed = {call.args[3].weight.dtype for call in scattered.call_args_list}
    assert summed == {torch.float32 if added else torch.bfloat16}
    torch.testing.assert_close(found.double(), true, rtol=2**-8, atol=1e-5)


@over("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_repeated_tokens(dtype, device):
    x, table = torch.randn(N, H).to(dtype), torch.randn(V, H).to(dtype)
    of = torch.tensor([0, 0, 0, 2, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 6])
    ids = torch.randint(V, (len(of), 1))
    ids[5:9] = 3  # one entry, several times
    weights = torch.randn(len(of), 1)
    x, table, of, ids, weights = (y.to(device) for y in (x, table, of, ids, weights))
    exact = [y.double() for y in (x, table, weights)]
    found = rows.dot(x, table, ids, dtype=torch.float32, of=of)
    torch.testing.assert_close(found.double()[:, 0], (exact[0][of] * exact[1][ids[:, 0]]).sum(1), rtol=1e-5, atol=1e-5)
    for module in (rows, plain):
        tokens, entries = torch.randn(N, H, device=device), torch.randn(V, H, device=device)
        right = tokens.double().index_add(0, of, exact[2] * exact[1][ids[:, 0]])
        module.add_weighted(tokens, weights, table, ids, of=of)
        torch.testing.assert_close(tokens.double(), right, rtol=1e-5, atol=1e-5)
        right = entries.double().index_add(0, ids[:, 0], exact[2] * exact[0][of])
        module.scatter(weights, x, ids, entries, of)
        torch.testing.assert_close(entries.double(), right, rtol=1e-5, atol=1e-5)


def look(sets: list[list[int]], labels: list[int] | None, device: str) -> Places | None:
    there = None if labels is None else torch.tensor(labels, device=device)
    return look_at(SamplingMask.of(sets).to(device), V, there, IGNORED)


IGNORED = 150
FIRST, LATER = list(range(60)), list(range(100, 300))


@over("labels", {"with labels": [3, 299], "without": None})
def test_sets_in_which_nothing_is_wrong_are_found_so(labels, device):
    found = look([FIRST, LATER], labels, device)
    assert found is not None
    assert found.tokens.tolist() == [0] * 60 + [1] * 200
    assert labels is None or (found.labels is not None and found.labels.tolist() == [3, 60 + 199])


@over(
    "sets",
    {
        "empty": [FIRST, []],
        "below": [FIRST, [*LATER, -1]],
        "above": [[V, *FIRST], LATER],
        "past 32 bits": [[*FIRST[:-1], 2**32 + FIRST[-1]], LATER],
        "twice in a block": [[*FIRST, 59], LATER],
        "twice in two": [FIRST, [*LATER, 100]],
        "the last twice": [FIRST, [*LATER, 299]],
    },
)
@over("labels", {"with labels": [3, 299], "without": None})
def test_every_fault_is_doubted(sets, labels, device):
    assert look(sets, labels, device) is None


def test_labels_outside_of_their_sets_are_doubted(device):
    assert look([FIRST, LATER], [3, 99], device) is None
    assert look([FIRST, LATER], [60, 299], device) is None


def test_a_label_that_is_ignored_is_doubted_though_its_set_has_it(device):
    assert look([FIRST, LATER], [3, IGNORED], device) is None
    assert look([FIRST, LATER], None, device) is not None
    ops = operands((N,), H, V)
    options = {"sampling_mask": mask_around(ops.labels).to(device), "ignore_index": int(ops.labels[2])}
    check(device, ops, ("logprob", "entropy"), **options)


@slow
def test_large_sets_are_left_to_be_sorted(device):
    with patch.object(sets, "COMPARED", 199):
        assert look([FIRST, LATER], [3, 299], device) is None
        ops = operands((N,), H, V)
        check(device, ops, ("logprob", "entropy"), sampling_mask=sets_of(ops.labels, (20, 210)).to(device))
