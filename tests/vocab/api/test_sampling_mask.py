"""Statistics over sampling masks: the numbers of the whole row with every other logit at -inf, at no product."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

import logitless as ll
from logitless.errors import DeviceError, DtypeError, LabelError, OptionError, ShapeError
from logitless.sample import SamplingMask
from logitless.vocab.call.validate import flatten
from logitless.vocab.passes.kept import entries_at_a_time
from tests.support.allocations import trace_allocations
from tests.support.vocab.comparing import EVERYTHING, PAIRED, compare, operands

V = 23


def mask_around(labels: torch.Tensor, rows: int, most: int | None = None) -> SamplingMask:
    """Sets of 1 to `most` ids in any order, each with its label, the first a singleton and the last the longest."""
    most = rows if most is None else most
    sizes = torch.randint(1, most + 1, labels.shape)
    if labels.numel():
        sizes[0], sizes[-1] = 1, most
    sets = []
    for label, size in zip(labels.tolist(), sizes.tolist(), strict=True):
        others = [i for i in torch.randperm(rows).tolist() if i != label][: size - 1]
        chosen = [max(label, 0), *others] if label >= 0 else others
        sets.append([chosen[i] for i in torch.randperm(len(chosen)).tolist()])
    return SamplingMask.of(sets)


@pytest.mark.parametrize(
    "transform",
    [
        {},
        {"bias": False},
        {"softcap": 4.0, "scale": 0.7},
        {"vocab_size": V - 3},
        {"ranks": (2, 3)},
        {"ranks": (2,), "softcap": 5.0},
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_every_statistic_and_gradient(transform, dtype):
    ops = operands((9,), dtype=dtype, reference=True, **transform)
    mask = mask_around(ops.labels, transform.get("vocab_size", V))
    compare(ops, EVERYTHING, sampling_mask=mask, temperature=0.8, jsd_beta=0.3)
    compare(ops, EVERYTHING, sampling_mask=mask, temperature=torch.rand(9) + 0.5, memory_budget=1)


@pytest.mark.parametrize("softcap", [None, 4.0])
@pytest.mark.parametrize("name", EVERYTHING)
def test_each_statistic(name, softcap):
    """Alone, so that no other one brings the sums and bases that it needs."""
    ops = operands((9,), reference=name in PAIRED, softcap=softcap)
    compare(ops, (name,), sampling_mask=mask_around(ops.labels, V))


@pytest.mark.parametrize("shift", [0.0, 7.0, -40.0])
def test_kl_of_a_policy_near_its_reference(shift):
    """In fp32, whatever number all its logits are higher by."""
    ops = operands((9,), dtype=torch.float32).training()
    ops.hidden = (ops.hidden * 8).round() / 8  # products and sums of these are exact
    ops.weight, ops.bias = ((x * 2**12).round() / 2**12 for x in (ops.weight, ops.bias))
    ops.ref = replace(ops, labels=None)
    ops.weight = ops.weight + torch.randint(-8, 9, ops.weight.shape) / 2**12
    ops.bias = ops.bias + shift
    mask, exact = mask_around(ops.labels, V), ops.to(torch.float64)
    got, expected = (
        ll.token_stats(x.hidden, x.head, x.labels, want=("kl",), reference=x.reference, sampling_mask=mask).kl
        for x in (ops, exact)
    )
    assert expected.max() > 1e-8
    torch.testing.assert_close(got.double(), expected, rtol=1e-3, atol=1e-12)


@pytest.mark.parametrize(("device", "entries"), [("cpu", 256), ("meta", 1 << 22)])
def test_a_gpu_takes_as_many_entries_at_a_time_as_its_budget_holds(device, entries):
    """Each chunk of them is some dozen launches; a CPU gathers rows, of which its caches hold few."""
    given = flatten(
        torch.empty(8, 4096), ll.LMHead(torch.empty(9, 4096)), None, want=("logsumexp",), memory_budget=1 << 30
    )
    given = replace(given, inputs=given.inputs._replace(hidden=torch.empty(8, 4096, device=device)))
    assert entries_at_a_time(given) == entries


@pytest.mark.parametrize("names", [("hidden",), ("weight",), ("bias",), ("a",), ("b",)], ids=str)
def test_each_gradient_alone(names):
    ops = operands((6,), ranks=(2,)).training(*names)
    compare(ops, ("logprob", "entropy", "max_logit", "mean_logit"), sampling_mask=mask_around(ops.labels, V))


def test_without_labels_and_with_leading_dimensions():
    ops = operands((2, 3))
    mask = mask_around(ops.labels.flatten(), V)
    got = ll.token_stats(ops.hidden, ops.head, want=("entropy", "max_logit"), sampling_mask=mask)
    assert got.entropy.shape == (2, 3)
    z = (ops.hidden @ ops.weight.T + ops.bias).flatten(0, 1)
    inside = [z[i, mask[i : i + 1].token_ids] for i in range(6)]
    expected = torch.stack([torch.distributions.Categorical(logits=x).entropy() for x in inside])
    torch.testing.assert_close(got.entropy.flatten(), expected)
    torch.testing.assert_close(got.max_logit.flatten(), torch.stack([x.max() for x in inside]))


def test_the_whole_vocabulary_as_every_set():
    ops = operands((5,), dtype=torch.float64, reference=True)
    mask = SamplingMask.of([range(V)] * 5)
    options = {"want": EVERYTHING, "reference": ops.reference}
    whole = ll.token_stats(ops.hidden, ops.head, ops.labels, **options)
    over = ll.token_stats(ops.hidden, ops.head, ops.labels, sampling_mask=mask, **options)
    for name in EVERYTHING:
        torch.testing.assert_close(getattr(over, name), getattr(whole, name), rtol=1e-12, atol=1e-12)


def test_a_singleton_is_certain_and_gives_no_gradient():
    ops = operands((4,), dtype=torch.float32, spread=50.0, reference=True)
    mask = SamplingMask.of([[i] for i in ops.labels.tolist()])
    want = ("logprob", "entropy", "kl", "reverse_kl", "jsd")
    stats = ll.token_stats(ops.hidden, ops.head, ops.labels, want=want, reference=ops.reference, sampling_mask=mask)
    for name in want:
        assert (getattr(stats, name) == 0).all(), name
    sum(getattr(stats, name) for name in want).sum().backward()
    for name, x in ops.leaves.items():
        assert (x.grad == 0).all(), name


def test_ignored_tokens_need_no_set():
    ops = operands((5,))
    ops.labels[[0, 3]] = -100
    sets = [[] if label < 0 else [label, (label + 1) % V] for label in ops.labels.tolist()]
    sets[3] = [V + 9, V + 9]  # never looked at
    stats = ll.token_stats(ops.hidden, ops.head, ops.labels, sampling_mask=SamplingMask.of(sets))
    assert (stats.logprob[[0, 3]] == 0).all()
    assert (stats.logprob[[1, 2, 4]] < 0).all()
    (grad,) = torch.autograd.grad(stats.logprob.sum(), ops.hidden)
    assert (grad[[0, 3]] == 0).all()


def test_no_token_at_all():
    ops = operands((0,))
    stats = ll.token_stats(ops.hidden, ops.head, ops.labels, sampling_mask=SamplingMask.of([]))
    stats.logprob.sum().backward()
    assert ops.weight.grad.count_nonzero() == 0


def test_entries_at_minus_infinity_and_logits_far_from_zero():
    ops = operands((6,), dtype=torch.float64, reference=True)
    with torch.no_grad():
        ops.bias[3], ops.bias[4] = -math.inf, -1e30
        ops.ref.bias[3], ops.ref.bias[5] = -math.inf, -1e9
    ops.labels[:] = 7
    mask = SamplingMask.of([[7], [3, 7], [7, 4], [3, 7, 9], list(range(V)), [7, 3, 4, 11]])
    compare(ops, ("logprob", "entropy", "kl", "logsumexp", "rank", "sum_sq_prob"), sampling_mask=mask)
    far = operands((6,), dtype=torch.float32, bias=True)
    with torch.no_grad():
        far.bias += 1e6
    exact = ll.token_stats(far.hidden.double(), far.to(torch.float64).head, far.labels, sampling_mask=mask_of(far))
    got = ll.token_stats(far.hidden, far.head, far.labels, sampling_mask=mask_of(far))
    rounded = 1e6 * torch.finfo(torch.float32).eps  # a logit's own rounding
    torch.testing.assert_close(got.logprob.double(), exact.logprob, rtol=0, atol=2 * rounded)


def mask_of(ops) -> SamplingMask:
    return SamplingMask.of([[int(i), (int(i) + 1) % V, (int(i) + 5) % V] for i in ops.labels])


@given(st.integers(0, 10**6), st.integers(1, 12), st.sampled_from([1, 2000, None]))
@settings(max_examples=25, deadline=None)
def test_any_sets(seed, n, budget):
    torch.manual_seed(seed)
    ops = operands((n,), reference=True, ranks=(1,) * (seed % 2), bias=bool(seed % 3))
    ops.labels[torch.rand(n) < 0.2] = -100
    compare(ops, EVERYTHING, sampling_mask=mask_around(ops.labels, V), memory_budget=budget)


def test_half_precision_operands_are_no_worse_than_whole_rows():
    ops = operands((64,), 32, 400, dtype=torch.bfloat16, bias=False)
    mask = SamplingMask.of([range(400)] * 64)
    exact = ops.to(torch.float64)
    expected = ll.token_stats(exact.hidden, exact.head, ops.labels).logprob
    over = ll.token_stats(ops.hidden, ops.head, ops.labels, sampling_mask=mask).logprob
    whole = ll.token_stats(ops.hidden, ops.head, ops.labels).logprob
    assert (over - expected).abs().max() <= (whole - expected).abs().max() + 1e-6


@pytest.mark.parametrize("budget", [None, 1 << 12])
def test_the_gradient_of_a_bf16_head_adds_up_in_fp32(budget):
    """Every token's set has the same entries, so that their rows are sums over all tokens."""
    n, h = 400, 16
    hidden = (1 + 0.1 * torch.randn(n, h)).bfloat16()
    weight = torch.randn(V, h).bfloat16().requires_grad_()
    mask = SamplingMask.of([[1, 5, 7]] * n)
    options = {"want": ("logsumexp",), "sampling_mask": mask, "memory_budget": budget}
    got, exact = (
        torch.autograd.grad(ll.token_stats(x, ll.LMHead(w), **options).logsumexp.sum(), w)[0].double()
        for x, w in ((hidden, weight), (hidden.double(), weight.detach().double().requires_grad_()))
    )
    torch.testing.assert_close(got, exact, rtol=2**-8, atol=0.0)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_token_loss_over_sets(reduction):
    ops = operands((7,))
    ops.labels[2] = -100
    mask, old = mask_around(ops.labels, V), torch.randn(7, dtype=torch.float64)

    def loss_fn(stats, old):
        return -torch.exp(stats.logprob - old) + 0.1 * stats.entropy

    options = {"want": ("logprob", "entropy"), "sampling_mask": mask, "inputs": (old,), "reduction": reduction}
    found = ll.token_loss(loss_fn, ops.hidden, ops.head, ops.labels, **options)
    stats = ll.token_stats(ops.hidden, ops.head, ops.labels, want=("logprob", "entropy"), sampling_mask=mask)
    each = torch.where(ops.labels == -100, 0, loss_fn(stats, old))
    expected = {"mean": each.sum() / 6, "sum": each.sum(), "none": each}[reduction]
    torch.testing.assert_close(found, expected)
    up = torch.randn_like(found)
    for got, wanted in zip(
        *(torch.autograd.grad(x, [ops.hidden, ops.weight], up) for x in (found, expected)), strict=True
    ):
        torch.testing.assert_close(got, wanted)


def test_a_ratio_over_sets_with_a_bonus_of_the_whole_row():
    """Log-probs over the sets enter a loss of the whole row as an input: the price is the whole row's alone."""
    ops = operands((7,))
    mask, old = mask_around(ops.labels, V), torch.randn(7, dtype=torch.float64)
    over = ll.token_stats(ops.hidden, ops.head, ops.labels, sampling_mask=mask).logprob

    def loss_fn(stats, logprob, old):
        return -torch.exp(logprob - old) - 0.1 * stats.entropy

    loss = ll.token_loss(loss_fn, ops.hidden, ops.head, ops.labels, want=("entropy",), inputs=(over, old))
    entropy = ll.token_stats(ops.hidden, ops.head, ops.labels, want=("entropy",)).entropy
    again = ll.token_stats(ops.hidden, ops.head, ops.labels, sampling_mask=mask).logprob
    expected = (-torch.exp(again - old) - 0.1 * entropy).mean()
    torch.testing.assert_close(loss, expected)
    for got, wanted in zip(*(torch.autograd.grad(x, [ops.hidden, ops.weight]) for x in (loss, expected)), strict=True):
        torch.testing.assert_close(got, wanted)


def test_no_product_with_the_vocabulary_and_nothing_of_its_size():
    n, h, v = 64, 16, 50_000
    hidden = torch.randn(n, h, requires_grad=True)
    head, labels = ll.LMHead(torch.randn(v, h)), torch.randint(v, (n,))
    sets = [[int(i), (int(i) + 7) % v, (int(i) + 11) % v] for i in labels]
    mask = SamplingMask.of(sets)

    def step():
        stats = ll.token_stats(hidden, head, labels, want=("logprob", "entropy"), sampling_mask=mask)
        (stats.logprob + stats.entropy).sum().backward()

    with FlopCounterMode(display=False) as counted:
        step()
    assert counted.get_total_flops() <= 2 * 3 * n * h * 3
    assert trace_allocations(step).peak <= 200 * n * h * 4
    explained = ll.explain(hidden, head, labels, want=("logprob", "entropy"), sampling_mask=mask)
    assert (explained.price.gemms, explained.price.method, explained.entries) == (0, "kept", 3 * n)
    assert explained.flop == 2 * 3 * n * h * 2
    assert "0 GEMMs (kept)" in str(explained)
    assert "192 entries of 64 tokens" in str(explained)


def test_under_torch_compile():
    ops = operands((4,), dtype=torch.float32)
    mask = mask_around(ops.labels, V)

    def logprob(hidden):
        return ll.token_stats(hidden, ops.head, ops.labels, sampling_mask=mask).logprob * 2

    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"a sampling_mask, .* break the graph"):
        torch.compile(logprob, backend="eager", fullgraph=True)(ops.hidden)
    torch.testing.assert_close(torch.compile(logprob, backend="eager")(ops.hidden), logprob(ops.hidden))


def test_masks_of_vllm():
    masks = [
        SimpleNamespace(token_ids=[5, 1, 2], offsets=[0, 1, 3]),
        SimpleNamespace(token_ids=[], offsets=[0]),
        SimpleNamespace(token_ids=[7], offsets=[0, 1]),
    ]
    mask = SamplingMask.from_vllm(masks)
    assert mask.to_vllm() == {"token_ids": [5, 1, 2, 7], "offsets": [0, 1, 3, 4]}
    assert len(mask) == 3
    assert mask.tokens.tolist() == [0, 1, 1, 2]
    assert mask[torch.tensor([2, 1])].to_vllm() == {"token_ids": [7, 1, 2], "offsets": [0, 1, 3]}
    assert mask[1:].to_vllm() == {"token_ids": [1, 2, 7], "offsets": [0, 2, 3]}
    assert SamplingMask.from_vllm([]).to_vllm() == {"token_ids": [], "offsets": [0]}
    assert SamplingMask.concatenated([]).to_vllm() == {"token_ids": [], "offsets": [0]}


LABELS = torch.tensor([1, 2, 3])
REFUSED = {
    "an empty set": ([[1], [], [3]], OptionError, "token 1 has none"),
    "an id twice": ([[1], [2], [4, 3, 4]], OptionError, "token 2 has 4 twice"),
    "an id beyond the vocabulary": ([[1], [2, V], [3]], LabelError, f"expected ids in 0..{V - 1}, token 1 has {V}"),
    "a negative id": ([[1, -1], [2], [3]], LabelError, "token 0 has -1"),
    "a label outside of its set": ([[1], [3], [3]], OptionError, "label 2 of token 1 is not"),
    "a last label above its set": ([[1], [2], [1]], OptionError, "label 3 of token 2 is not"),
    "no set with an id": ([[], [], []], OptionError, "token 0 has none"),
    "too few sets": ([[1], [2]], ShapeError, "a set for each of 3 tokens, got 2"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_sets_that_cannot_be(case):
    sets, kind, words = REFUSED[case]
    ops = operands((3,))
    with pytest.raises(kind, match=words):
        ll.token_stats(ops.hidden, ops.head, LABELS, sampling_mask=SamplingMask.of(sets))


def test_errors_name_tokens_as_the_caller_counts_them():
    ops = operands((4,))
    labels = torch.tensor([-100, 2, -100, 3])
    with pytest.raises(OptionError, match="label 3 of token 3 is not"):
        ll.token_stats(ops.hidden, ops.head, labels, sampling_mask=SamplingMask.of([[], [2], [], [4]]))
    with pytest.raises(OptionError, match="token 3 has 4 twice"):
        ll.token_stats(ops.hidden, ops.head, labels, sampling_mask=SamplingMask.of([[], [2], [], [4, 3, 4]]))


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"sampling_mask": [[1], [2], [3]]}, DtypeError, "expected a SamplingMask, got list"),
        ({"sampling_mask": SamplingMask.of([[1], [2], [3]]), "top_k": 2}, OptionError, "no top_k or candidates"),
        ({"sampling_mask": SamplingMask(torch.arange(4), torch.tensor([0, 3, 2, 4]))}, OptionError, "not all rising"),
        ({"sampling_mask": SamplingMask(torch.arange(4), torch.tensor([0, 1, 2, 3]))}, OptionError, "from 0 to 4"),
    ],
    ids=str,
)
def test_masks_that_do_not_fit(options, kind, words):
    ops = operands((3,))
    with pytest.raises(kind, match=words):
        ll.token_stats(ops.hidden, ops.head, LABELS, **options)


@pytest.mark.parametrize(
    ("ids", "offsets", "kind", "words"),
    [
        ([1, 2], torch.tensor([0, 2]), DtypeError, "SamplingMask.of takes lists"),
        (torch.rand(3), torch.tensor([0, 3]), DtypeError, "token_ids must be a tensor of integers"),
        (torch.arange(4).view(2, 2), torch.tensor([0, 4]), ShapeError, "one dimension"),
        (torch.arange(4), torch.empty(0, dtype=torch.int64), ShapeError, "a number more"),
        (torch.arange(2, device="meta"), torch.tensor([0, 2]), DeviceError, "token_ids are on meta, offsets on cpu"),
    ],
)
def test_what_a_mask_is_made_of(ids, offsets, kind, words):
    with pytest.raises(kind, match=words):
        SamplingMask(ids, offsets)
