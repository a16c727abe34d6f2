"""A head over a draft vocabulary against a target over all of it: as a head whose other rows are impossible."""

from dataclasses import replace

import pytest
import torch

import logitless as ll
from logitless.errors import DtypeError, OptionError, ShapeError
from logitless.sample import SamplingMask
from logitless.vocab.head.low_rank import LowRank
from logitless.vocab.reference import dense_logits, dense_token_stats
from tests.support.vocab.comparing import (
    Operands,
    assert_near,
    assert_near_in_norm,
    cotangents_like,
    gradients,
    operands,
)
from tests.support.vocab.measuring import measure, not_interpreted

WANT = (
    *("logprob", "entropy", "kl", "reverse_kl_shared", "jsd", "kl_mixture", "reverse_kl_mixture"),
    *("acceptance", "total_variation"),
)
V, DRAFT = 403, 61


def drafted(dtype=torch.float64, **transform) -> tuple[Operands, torch.Tensor, dict]:
    """Operands over a draft vocabulary, its ids, and the target's head and hidden states."""
    ops = operands((2, 5), 6, DRAFT, dtype=dtype, **transform)
    target = operands((2, 5), 8, V, dtype=dtype, **transform)
    ops.labels[1, 2] = -100
    return ops, torch.randperm(V)[:DRAFT], {"reference": (target.hidden.detach(), target.head)}


def spread(ops: Operands, ids: torch.Tensor) -> tuple[ll.LMHead, torch.Tensor | None]:
    """The head over all entries, those that the draft lacks at -inf, and the labels in that vocabulary."""
    weight = ops.weight.new_zeros(V, ops.weight.shape[1]).index_copy(0, ids, ops.weight)
    bias = ops.weight.new_zeros(DRAFT) if ops.bias is None else ops.bias
    adapters = tuple(
        LowRank(x.a, x.b.new_zeros(V, x.b.shape[1]).index_copy(0, ids, x.b), x.scaling) for x in ops.adapters
    )
    head = ll.LMHead(
        weight, ops.weight.new_full((V,), -torch.inf).index_copy(0, ids, bias), adapters=adapters, **ops.transform
    )
    return head, None if ops.labels is None else torch.where(ops.labels < 0, ops.labels, ids[ops.labels.clamp_min(0)])


def forward_kl_of_shares(ops: Operands, ids: torch.Tensor, options: dict) -> torch.Tensor:
    """KL(target || draft) over the draft's entries, the target's probabilities as shares of what it gives to these."""
    target_hidden, target = options["reference"]
    temperature = options.get("temperature", 1.0)
    shared = dense_logits(target_hidden, target, temperature)[..., ids].log_softmax(-1)
    logp = dense_logits(ops.hidden, ops.head, temperature).log_softmax(-1)
    kl = (shared.exp() * (shared - logp)).sum(-1)
    return kl if ops.labels is None else kl.where(ops.labels != -100, 0)


def check(ops, ids, options, want=WANT, tolerance=1e-9, **ours_only):
    exact = ops.to(torch.float64)
    head, labels = spread(exact, ids)
    expected = dense_token_stats(exact.hidden, head, labels, want=want, **options)
    if "reverse_kl_shared" in want:
        expected["reverse_kl_shared"] = forward_kl_of_shares(exact, ids, options)
    draft = replace(ops.head, token_ids=ids)
    stats = ll.token_stats(ops.hidden, draft, ops.labels, want=want, **options, **ours_only)
    got = {name: getattr(stats, name) for name in want}
    for name, x in got.items():
        assert_near(x.detach(), expected[name].detach(), tolerance, name)
    up = cotangents_like(expected)
    wanted = gradients(expected, exact.leaves, up)
    for name, grad in gradients(got, ops.leaves, up).items():
        assert_near_in_norm(grad, wanted[name], 2 * tolerance, f"d {name}", floor=tolerance / 10)


@pytest.mark.parametrize("budget", [None, 20_000])
@pytest.mark.parametrize("labels", [True, False])
@pytest.mark.parametrize("transform", [{}, {"scale": 0.5, "ranks": (2,)}, {"bias": False}], ids=str)
def test_equals_a_head_whose_other_rows_are_impossible(transform, labels, budget, backend):
    ops, ids, options = drafted(**transform)
    if not labels:
        ops.labels = None
    options |= {"temperature": torch.rand(2, 5, dtype=torch.float64) + 0.5, "jsd_beta": 0.3}
    check(ops, ids, options, WANT if labels else WANT[1:], memory_budget=budget, backend=backend)


@pytest.mark.parametrize("want", [("kl",), ("reverse_kl_shared",), ("acceptance",)], ids=str)
def test_frozen_head_and_single_precision(want, backend):
    ops, ids, options = drafted(torch.float32)
    check(ops.training("hidden"), ids, options, want, tolerance=3e-5, backend=backend)


def test_a_target_in_fp32_beside_a_draft_in_fp64(backend):
    """What the draft lacks is looked at in the draft's precision, as all else."""
    ops, ids, options = drafted()
    target = operands((2, 5), 8, V, dtype=torch.float32)
    check(ops, ids, options | {"reference": (target.hidden.detach(), target.head)}, backend=backend)


def test_labels_that_count_are_told_by_the_ignore_index_alone(backend):
    """Also where that is 0, as padding often is."""
    ops, ids, options = drafted(torch.float32)
    ops.labels = ops.labels.clamp_min(1)
    want = ("kl", "jsd", "acceptance")
    expected = ll.token_stats(ops.hidden, replace(ops.head, token_ids=ids), None, want=want, **options)
    ops.labels[1, 2] = 0
    call = ops.hidden, replace(ops.head, token_ids=ids), ops.labels
    got = ll.token_stats(*call, want=want, ignore_index=0, backend=backend, **options)
    for name in want:
        assert_near(getattr(got, name), getattr(expected, name).double().where(ops.labels != 0, 0), 3e-5, name)


@pytest.mark.compiled
def test_a_reference_with_equal_token_ids_breaks_no_graph():
    ops, ids, options = drafted(torch.float32)
    hidden, head = options["reference"][0], replace(ops.head, token_ids=ids)
    reference = hidden, ll.LMHead(torch.randn(DRAFT, 8), token_ids=ids.clone())

    def kl(x):
        return ll.token_stats(x, head, want=("kl",), reference=reference).kl

    compiled = torch.compile(kl, backend="eager", fullgraph=True)
    assert torch.equal(compiled(ops.hidden), kl(ops.hidden))


@pytest.mark.compiled
def test_a_target_beside_its_draft_breaks_the_graph():
    ops, ids, options = drafted(torch.float32)
    head = replace(ops.head, token_ids=ids)

    def kl(x):
        return ll.token_stats(x, head, want=("kl",), **options).kl

    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"a draft's head beside its target's, .* break the graph"):
        torch.compile(kl, backend="eager", fullgraph=True)(ops.hidden)


def test_softcap():
    """Of the target as of the draft: the oracle's -inf passes no softcap, so probabilities are compared."""
    ops, ids, options = drafted(softcap=3.0)
    target_hidden, target = options["reference"]
    p = (3 * torch.tanh((ops.hidden @ ops.weight.T + ops.bias) / 3)).softmax(-1)
    q = (3 * torch.tanh((target_hidden @ target.weight.T + target.bias) / 3)).softmax(-1)[..., ids]
    stats = ll.token_stats(ops.hidden, replace(ops.head, token_ids=ids), want=("kl", "acceptance"), **options)
    torch.testing.assert_close(stats.acceptance, torch.minimum(p, q).sum(-1))
    torch.testing.assert_close(stats.kl, (p * (p / q).log()).sum(-1))


def test_token_loss_gives_the_same_gradient(backend):
    ops, ids, options = drafted()
    head, want = replace(ops.head, token_ids=ids), ("acceptance", "kl")
    loss_fn = lambda s: ll.losses.negative_log_acceptance(s.acceptance) + 0.1 * s.kl  # noqa: E731
    found = []
    for reduction in ("sum", "none"):
        loss = ll.token_loss(
            loss_fn, ops.hidden, head, ops.labels, want=want, reduction=reduction, backend=backend, **options
        )
        found.append(torch.autograd.grad(loss.sum(), list(ops.leaves.values())))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_lk_hybrid_of_a_draft_vocabulary(reduction, backend):
    """Forward KL to the target over the draft's entries, the distance from the target over all of its own."""
    ops, ids, options = drafted()
    ops.labels = None
    loss = ll.token_loss(
        lambda s: ll.losses.lk_hybrid(s.reverse_kl_shared, s.total_variation),
        *(ops.hidden, replace(ops.head, token_ids=ids)),
        want=("reverse_kl_shared", "total_variation"),
        reduction=reduction,
        backend=backend,
        **options,
    )
    target_hidden, target = options["reference"]
    s, t = dense_logits(ops.hidden, ops.head).log_softmax(-1), dense_logits(target_hidden, target)
    q, shared = t.softmax(-1)[..., ids], t[..., ids].log_softmax(-1)
    distance = 1 - torch.minimum(s.exp(), q).sum(-1)
    weight = torch.exp(-3 * (1 - distance.detach()))
    expected = weight * (shared.exp() * (shared - s)).sum(-1) + (1 - weight) * distance
    torch.testing.assert_close(loss.sum(), expected.sum())
    up = torch.autograd.grad(loss.sum(), list(ops.leaves.values()))
    for one, other in zip(up, torch.autograd.grad(expected.sum(), list(ops.leaves.values())), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("logit", [-60.0, -100.0, -300.0])
def test_a_target_that_gives_a_draft_next_to_nothing(logit):
    """Of 1e-26 in fp32, or of what is no fp32 number, what it gives to the draft's entries is divided as any."""
    ops, ids, options = drafted(torch.float32, bias=False)
    target_hidden, target = options["reference"]
    bias = torch.zeros(V).index_fill(0, ids, logit)
    options["reference"] = target_hidden, ll.LMHead(target.weight, bias)
    want = ("reverse_kl_shared",)
    stats = ll.token_stats(ops.hidden, replace(ops.head, token_ids=ids), want=want, **options)
    alone = ll.token_stats(ops.hidden, ops.head, want=want, reference=(target_hidden, ll.LMHead(target.weight[ids])))
    torch.testing.assert_close(stats.reverse_kl_shared, alone.reverse_kl_shared, rtol=1e-4, atol=1e-5)
    grads = [torch.autograd.grad(x.reverse_kl_shared.sum(), ops.hidden)[0] for x in (stats, alone)]
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("labels", [True, False])
def test_a_target_that_gives_a_draft_nothing(labels, backend):
    """None of the draft's entries is possible: an infinite KL, probabilities that have nothing in common."""
    ops, ids, options = drafted(torch.float32)
    ops.labels = ops.labels if labels else None
    _, target = options["reference"]
    options["reference"] = options["reference"][0], replace(target, bias=target.bias.index_fill(0, ids, -torch.inf))
    check(ops, ids, options, ("jsd", "acceptance", "total_variation"), tolerance=3e-5, backend=backend)
    head, want = replace(ops.head, token_ids=ids), ("kl", "kl_mixture", "reverse_kl_mixture")
    stats = ll.token_stats(ops.hidden, head, ops.labels, want=want, backend=backend, **options)
    assert stats.kl[0].isposinf().all()
    for x in (stats.kl_mixture[0], stats.reverse_kl_mixture[0]):
        torch.testing.assert_close(x, torch.full((5,), 2.0).log())


def test_all_entries_in_another_order_are_the_whole_vocabulary():
    _, _, options = drafted()
    target_hidden, target = options["reference"]
    ids = torch.randperm(V)
    shuffled = ll.LMHead(target.weight[ids], target.bias[ids], token_ids=ids)
    stats = ll.token_stats(
        target_hidden, shuffled, want=("kl", "reverse_kl", "reverse_kl_shared", "acceptance"), **options
    )
    assert (stats.reverse_kl_shared == stats.reverse_kl).all()
    assert stats.kl.abs().max() < 1e-12
    torch.testing.assert_close(stats.acceptance, torch.ones(2, 5, dtype=torch.float64))


@pytest.mark.parametrize("labels", [True, False])
def test_over_sampling_masks_no_entry_is_lacked(labels, backend):
    """Of a token's own few entries the draft has all, so the KL from the target is finite."""
    ops, ids, options = drafted()
    target_hidden, target = options["reference"]
    ops.labels = ops.labels.clamp_min(0) if labels else None
    entries = ops.labels.flatten() if labels else torch.arange(10)
    mask = SamplingMask.of([[int(i), (int(i) + 3) % DRAFT, (int(i) + 7) % DRAFT] for i in entries])
    own, want = ll.LMHead(target.weight[ids], target.bias[ids]), ("kl", "reverse_kl", "reverse_kl_shared", "jsd")
    options = {"want": want, "sampling_mask": mask}
    expected = dense_token_stats(ops.hidden, ops.head, ops.labels, reference=(target_hidden, own), **options)
    draft = replace(ops.head, token_ids=ids)
    stats = ll.token_stats(ops.hidden, draft, ops.labels, reference=(target_hidden, target), backend=backend, **options)
    got = {name: getattr(stats, name) for name in want}
    for name, x in got.items():
        assert_near(x.detach(), expected[name].detach(), 1e-9, name)
    up = cotangents_like(expected)
    wanted = gradients(expected, ops.leaves, up)
    for name, grad in gradients(got, ops.leaves, up).items():
        assert_near_in_norm(grad, wanted[name], 2e-9, f"d {name}", floor=1e-10)


def test_flop_are_counted_and_explained():
    ops, ids, options = drafted(torch.float32)
    head = replace(ops.head, token_ids=ids)

    def step():
        with torch.no_grad():
            ll.token_stats(ops.hidden, head, want=("acceptance", "kl"), **options)

    with torch.no_grad():
        told = ll.explain(ops.hidden, head, want=("acceptance", "kl"), **options)
    assert f"and 1 over the {V - DRAFT} entries that the draft lacks" in str(told)
    n = 10
    assert told.flop == measure(step).flops == 2 * n * (DRAFT * 6 + V * 8)


@not_interpreted
def test_memory_keeps_to_slices(backend):
    hidden, target_hidden = torch.randn(256, 16), torch.randn(256, 16)
    target, ids = ll.LMHead(torch.randn(40_000, 16)), torch.randperm(40_000)[:8_000]
    draft, budget = ll.LMHead(target.weight[ids].clone(), token_ids=ids), 2 << 20

    def step():
        with torch.no_grad():
            ll.token_stats(
                *(hidden, draft), want=("kl", "acceptance"), reference=(target_hidden, target), memory_budget=budget,
                backend=backend,
            )  # fmt: skip

    ids_and_mask = 40_000 * 9 + 8_000 * 8
    assert measure(step, memory=True).peak < budget + ids_and_mask + 256 * 4 * 60


def test_refusals():
    ops, ids, options = drafted()
    head = replace(ops.head, token_ids=ids)
    with pytest.raises(
        OptionError, match=r"reverse_kl is infinite .* want reverse_kl_shared, over the entries that both"
    ):
        ll.token_stats(ops.hidden, head, want=("reverse_kl",), **options)
    with pytest.raises(OptionError, match=r"token_ids must be in 0\.\.402, the reference's vocabulary, got 403"):
        ll.token_stats(ops.hidden, replace(head, token_ids=torch.arange(V - DRAFT + 1, V + 1)), want=("kl",), **options)
    twice = ids.clone()
    twice[1] = twice[0]
    with pytest.raises(OptionError, match="name every entry once, got 61 ids of 60 entries"):
        ll.token_stats(ops.hidden, replace(head, token_ids=twice), want=("kl",), **options)
    with pytest.raises(ShapeError, match=r"token_ids must have shape \(61,\)"):
        replace(head, token_ids=ids[:4])
    with pytest.raises(DtypeError, match="token_ids must be an int64 tensor"):
        replace(head, token_ids=ids.float())
    hidden, other = options["reference"][0], ll.LMHead(torch.randn(DRAFT, 8), token_ids=ids.roll(1))
    for own in (head, ops.head):
        with pytest.raises(OptionError, match="one with the head's own token_ids, got other token_ids"):
            ll.token_stats(ops.hidden, own, want=("kl",), reference=(hidden, other))
    pairs = (head, replace(other, token_ids=ids.clone())), (ops.head, replace(other, token_ids=None))
    assert torch.equal(*(ll.token_stats(ops.hidden, x, want=("kl",), reference=(hidden, y)).kl for x, y in pairs))
    with pytest.raises(ShapeError, match="or token_ids on a draft's head"):
        ll.token_stats(ops.hidden, ops.head, want=("kl",), **options)
