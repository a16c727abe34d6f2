"""Differentiable generation: every way to carry the gradient against a dense Gumbel-softmax over whole prefixes."""

import math

import pytest
import torch
from torch import Tensor

from logitless import LMHead, relax
from logitless.errors import GradientError, OptionError, ShapeError
from logitless.relax import Reader, Sampling, generate
from logitless.relax.generate import alive_until
from logitless.relax.tokens import rows_in
from tests.support.allocations import trace_allocations
from tests.support.relax.tiny import TAU, B, T, Tiny, V, batch, dense, distance, gradients


def ours(model: Tiny, reference: Tiny, cotangent: Tensor, **options) -> relax.Rollout:
    prompts, mask, seeds = batch()
    sampling = Sampling(T, TAU, **{"k": V, **options})
    rollout = generate(model.reader(), prompts, mask, seeds, sampling, reference=reference.reader())
    loss = (rollout.soft.weights * cotangent.gather(-1, rollout.soft.ids)).sum() + 0.3 * rollout.kl.sum()
    model.zero_grad()
    rollout.backward(loss)
    return rollout


@pytest.mark.parametrize("hard", [False, True])
@pytest.mark.parametrize("carry", ["cached", "recompute", "sweeps"])
@pytest.mark.parametrize("keep", [True, False])
def test_every_way_equals_the_dense_one(carry, hard, keep):
    model, reference = Tiny(), Tiny(seed=7)
    cotangent = torch.randn(B, T, V, dtype=torch.float64)
    loss, tokens, kl = dense(model, reference, hard, cotangent)
    loss.backward()
    exact = gradients(model)
    rollout = ours(model, reference, cotangent, hard=hard, carry=carry, checkpoint=keep, tolerance=0.0)
    assert rollout.soft.token.equal(tokens)
    torch.testing.assert_close(rollout.kl.double(), kl.detach(), rtol=1e-9, atol=1e-10)
    assert distance(gradients(model), exact) < 1e-9
    if carry == "sweeps":
        assert rollout.carried.sweeps == T - 1


@pytest.mark.parametrize("hard", [False, True])
@pytest.mark.parametrize("carry", ["cached", "recompute", "sweeps"])
def test_all_entries_without_their_weights_equal_the_dense_one(carry, hard):
    model, reference = Tiny(), Tiny(seed=7)
    cotangent = torch.randn(B, T, V, dtype=torch.float64)
    loss, tokens, kl = dense(model, reference, hard, cotangent)
    loss.backward()
    exact = gradients(model)
    model.zero_grad()
    prompts, mask, seeds = batch()
    weights = torch.eye(V, dtype=torch.float64)  # the table whose soft rows are the weights
    sampling = Sampling(T, TAU, k=0, hard=hard, carry=carry, tolerance=0.0)
    rollout = generate(model.reader(), prompts, mask, seeds, sampling, reference=reference.reader(), tables=(weights,))
    rollout.backward((rollout.soft.embedded[-1] * cotangent).sum() + 0.3 * rollout.kl.sum())
    assert rollout.soft.token.equal(tokens)
    assert rollout.soft.weights.shape == (B, T, 0)
    torch.testing.assert_close(rollout.kl.double(), kl.detach(), rtol=1e-9, atol=1e-10)
    assert distance(gradients(model), exact) < 1e-9
    with pytest.raises(OptionError, match="formed with 3 tables of which this is none"):
        rows_in(rollout.soft, weights.clone())


def test_sweeps_come_nearer_one_by_one():
    model, reference = Tiny(), Tiny(seed=7)
    cotangent = torch.randn(B, T, V, dtype=torch.float64)
    ours(model, reference, cotangent, k=9, carry="cached")
    exact = gradients(model)
    errors = []
    for most in range(T):
        ours(model, reference, cotangent, k=9, carry="sweeps", most_sweeps=most)
        errors.append(distance(gradients(model), exact))
    assert errors[0] > 0.01
    assert errors[-1] < 1e-9 < errors[-2] < errors[0]
    rollout = ours(model, reference, cotangent, k=9, carry="sweeps", tolerance=0.5)
    assert rollout.carried.sweeps < T - 1
    assert rollout.carried.left <= 0.5


def test_a_losss_own_backward_is_refused_where_it_leaves_sweeps_out():
    model, reference = Tiny(), Tiny(seed=7)
    prompts, mask, seeds = batch()

    def made(steps: int = T, k: int = 9, **options) -> relax.Rollout:
        model.zero_grad()
        sampling = Sampling(steps, TAU, k=k, tolerance=0.0, **options)
        return generate(model.reader(), prompts, mask, seeds, sampling, reference=reference.reader())

    with pytest.raises(
        GradientError, match=r"expected rollout\.backward\(loss\).*: zero the gradients, generate again"
    ):
        made().kl.sum().backward()
    rollout = made()
    for loss, of in (
        (rollout.kl.sum(), list(model.parameters())),
        (rollout.soft.weights.square().sum(), [model.table]),
        (rollout.hidden.sum(), [model.table]),
        (made(k=0).soft.embedded[0].sum(), [model.head]),
    ):
        with pytest.raises(GradientError, match=r"got a backward or autograd\.grad of the loss itself"):
            torch.autograd.grad(loss, of, retain_graph=True, allow_unused=True)
    rollout = made()  # with gradients of zero, as the message says
    rollout.backward(rollout.kl.sum())
    ways = [gradients(model)]
    rollout = made(carry="cached")
    rollout.backward(rollout.kl.sum())
    assert distance(ways[0], gradients(model)) < 1e-9
    for whole in ({"carry": "cached"}, {"steps": 1}, {"most_sweeps": 0}):  # which have none
        made(**whole).kl.sum().backward()
        exact = gradients(model)
        rollout = made(**whole)
        rollout.backward(rollout.kl.sum())
        assert distance(gradients(model), exact) == 0


@pytest.mark.parametrize("carry", ["cached", "sweeps", "none"])
@pytest.mark.parametrize("hard", [False, True])
def test_an_unchanged_policy_has_no_kl(carry, hard):
    model = Tiny()
    prompts, mask, seeds = batch()
    sampling = Sampling(T, TAU, k=9, hard=hard, carry=carry)
    rollout = generate(model.reader(), prompts, mask, seeds, sampling, reference=Tiny().reader())
    assert rollout.kl.shape == (B, T)
    assert not rollout.kl.detach().any()
    assert rollout.soft.weights.requires_grad == rollout.kl.requires_grad == (carry != "none")


def test_a_sequence_ends_after_its_end():
    token = torch.tensor([[4, 2, 5, 2], [2, 2, 2, 2], [1, 1, 1, 1]])
    assert alive_until(token, 2).tolist() == [[True, True, False, False], [True] + [False] * 3, [True] * 4]
    model, reference = Tiny(), Tiny(seed=7)
    prompts, mask, seeds = batch()
    tokens = generate(model.reader(), prompts, mask, seeds, Sampling(T, k=9, carry="none")).soft.token
    sampling = Sampling(T, k=9, carry="none", end=int(tokens[0, 1]))
    rollout = generate(model.reader(), prompts, mask, seeds, sampling, reference=reference.reader())
    assert not rollout.alive[0, 2:].any()
    assert not rollout.kl[0, 2:].any()
    assert bool((rollout.kl[0, :2] > 0).all())


def test_padding_and_company_change_nothing():
    model = Tiny()
    prompts, mask, seeds = batch()
    both = generate(model.reader(), prompts, mask, seeds, Sampling(T, k=9, carry="none"))
    alone = generate(model.reader(), prompts[:1, 1:], mask[:1, 1:], seeds[:1], Sampling(T, k=9, carry="none"))
    assert both.soft.token[0].equal(alone.soft.token[0])


def test_narrow_seeds_are_those_of_int64():
    """Positions past 127 are counted, too."""
    model = Tiny()
    prompts, mask, seeds = batch()
    sampling = Sampling(130, k=1, carry="none")
    found = [generate(model.reader(), prompts, mask, x, sampling).soft.token for x in (seeds, seeds.to(torch.int8))]
    assert found[0].equal(found[1])


def kept_bytes(steps: int, vocab: int, **options) -> tuple[int, int]:
    """(bytes alive when generation returns, largest storage); the head and table frozen, as with adapters."""
    model = Tiny(vocab=vocab)
    head = (4 * model.head).detach()
    reader = Reader(model.body, model.table.detach(), lambda: LMHead(head))
    prompts, mask, seeds = batch()
    sampling = Sampling(steps, TAU, k=4, memory_budget=2**18, **options)
    found = trace_allocations(lambda: generate(reader, prompts, mask, seeds, sampling, reference=reader))
    return found.kept, found.largest


@pytest.mark.parametrize("carry", ["cached", "sweeps"])
def test_what_is_kept_grows_with_steps_and_not_with_the_vocabulary(carry):
    (small, _), (large, largest) = kept_bytes(8, 50, carry=carry), kept_bytes(8, 5000, carry=carry)
    assert large < 1.2 * small
    assert largest < 8 * 5000 * 8  # half of (B, T, V) in fp32


def test_what_is_kept_is_linear_in_steps():
    (short, _), (long, _) = kept_bytes(8, 50, carry="cached"), kept_bytes(32, 50, carry="cached")
    assert long < 4.1 * short  # no key, value or mask is kept once per step that reads it


@pytest.mark.parametrize("carry", ["cached", "recompute"])
def test_activations_are_computed_anew_with_a_checkpoint_alone(carry):
    model, reference = Tiny(), Tiny(seed=7)
    read, body = [], model.body
    model.body = lambda *given: read.append(given) or body(*given)
    for anew in (True, False):
        read.clear()
        ours(model, reference, torch.ones(B, T, V), carry=carry, checkpoint=anew)
        assert len(read) == (2 * T if anew else T)


@pytest.mark.parametrize(("k", "carry"), [(0, "sweeps"), (0, "cached"), (9, "cached")])
def test_every_product_with_the_head_keeps_to_the_budget(k, carry, monkeypatch):
    prompts, mask, seeds = batch()
    reader, seen = Tiny().reader(), []
    for name in ("gumbel_topk", "online_kl"):
        own = generate.__globals__[name]

        def told(*given, own=own, memory_budget: int | None = None, **options):
            seen.append(memory_budget)
            return own(*given, memory_budget=memory_budget, **options)

        monkeypatch.setitem(generate.__globals__, name, told)
    generate(reader, prompts, mask, seeds, Sampling(T, k=k, carry=carry, memory_budget=999), reference=reader)
    assert seen == [999] * (T + 1 + (carry == "sweeps"))


def test_bad_input_is_refused():
    model = Tiny()
    prompts, mask, seeds = batch()
    with pytest.raises(ShapeError, match="expected prompts"):
        generate(model.reader(), prompts, mask[:, :-1], seeds, Sampling(T))
    for none in (prompts[:0], mask[:0], seeds[:0]), (prompts[:, :0], mask[:, :0], seeds):
        with pytest.raises(ShapeError, match=r"B and P at least 1, got \((0, 3|2, 0)\)"):
            generate(model.reader(), *none, Sampling(T))
    with pytest.raises(OptionError, match="mask: expected prompts that are padded on the left"):
        generate(model.reader(), prompts, mask.flip(0, 1), seeds, Sampling(T))
    for wrong, words in (
        ({"steps": 0}, "steps: expected a whole number of at least 1, got 0"),
        ({"steps": 2.5}, "steps: expected a whole number of at least 1, got 2.5"),
        ({"steps": 2, "carry": "magic"}, "carry: expected one of"),
        *(({"steps": 2, "most_sweeps": x}, f"most_sweeps: expected a whole .* 0, got {x!r}") for x in (-1, 1.5, "a")),
        *(({"steps": 2, "end": x}, f"end: expected a whole number of at least 0, got {x!r}") for x in (-1, True, "a")),
        ({"steps": 2, "tolerance": math.nan}, "tolerance: expected a share of the gradient, 0 or more, got nan"),
        ({"steps": 2, "tolerance": "1e-6"}, "tolerance: expected a share"),
    ):
        with pytest.raises(OptionError, match=words):
            Sampling(**wrong)
    assert repr(Sampling(torch.tensor(T), end=torch.tensor(3))) == repr(Sampling(T, end=3))
    with pytest.raises(OptionError, match="k: expected a whole number"):
        generate(model.reader(), prompts, mask, seeds, Sampling(T, k=V + 1))
    with pytest.raises(OptionError, match="tau: expected"):
        generate(model.reader(), prompts, mask, seeds, Sampling(T, tau=0.0, k=4))
