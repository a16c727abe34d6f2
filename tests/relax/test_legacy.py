"""Whole-vocabulary generation, kept to compare with: against the float64 oracle, `generate`, and its own bytes."""

import pytest
import torch

from logitless import LMHead
from logitless.relax import Reader, Sampling, generate, soft_embedding
from logitless.vocab.reference import dense_logits
from logitless.workbench.grade.legacy import generate_whole, rollout_bytes, whole_logits
from tests.support.allocations import trace_allocations
from tests.support.relax.tiny import TAU, B, H, T, Tiny, V, batch, dense, distance, gradients
from tests.support.vocab.comparing import assert_near_in_norm


def whole(model: Tiny, reference: Tiny, **options):
    prompts, mask, seeds = batch()
    sampling = Sampling(T, TAU, **{"hard": True, **options})
    return generate_whole(model.reader(), prompts, mask, seeds, sampling, reference=reference.reader())


@pytest.mark.parametrize("hard", [False, True])
def test_it_equals_the_oracle(hard):
    model, reference = Tiny(), Tiny(seed=7)
    cotangent = torch.randn(B, T, V, dtype=torch.float64)
    loss, tokens, kl = dense(model, reference, hard, cotangent)
    loss.backward()
    exact = gradients(model)
    model.zero_grad()
    rollout = whole(model, reference, hard=hard)
    rollout.backward((rollout.weights * cotangent).sum() + 0.3 * rollout.kl.sum())
    assert rollout.token.equal(tokens)
    torch.testing.assert_close(rollout.kl, kl, rtol=1e-9, atol=1e-12)
    assert distance(gradients(model), exact) < 1e-9


@pytest.mark.parametrize("hard", [False, True])
def test_generate_over_all_entries_equals_it_in_fp32(hard):
    table = torch.randn(V, 6)
    end = int(whole(Tiny(), Tiny()).token[0, 2])
    found = []
    for k in (0, V):
        model, reference = Tiny().float(), Tiny(seed=7).float()
        prompts, mask, seeds = batch()
        sampling = Sampling(T, TAU, k=k or 9, hard=hard, end=end)
        both = (model.reader(), prompts, mask, seeds, sampling)
        if k == 0:
            rollout = generate_whole(*both, reference=reference.reader())
            rows, token = rollout.embedding(table), rollout.token
        else:
            rollout = generate(*both, reference=reference.reader())
            rows, token = soft_embedding(rollout.soft, table), rollout.soft.token
        reward = torch.tanh((rows * rollout.alive[..., None]).sum(1)).sum(-1)
        rollout.backward((0.3 * rollout.kl.sum(-1) - reward).mean())
        found.append((token, rollout.alive, rollout.kl.detach(), reward.detach(), gradients(model)))
    (token, alive, kl, reward, exact), (token_k, alive_k, kl_k, reward_k, gradient) = found
    assert token_k.equal(token)
    assert alive_k.equal(alive)
    assert not alive[0, 3:].any()
    torch.testing.assert_close(kl_k, kl, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(reward_k, reward, rtol=1e-5, atol=1e-6)
    assert distance(gradient, exact) < 2e-5


def test_an_unchanged_policy_has_no_kl():
    assert not whole(Tiny(), Tiny()).kl.detach().any()
    prompts, mask, seeds = batch()
    alone = generate_whole(Tiny().reader(), prompts, mask, seeds, Sampling(T, k=9))
    assert alone.kl.shape == (B, T)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_logits_of_a_padded_and_capped_head(dtype):
    hidden = torch.randn(3, H).to(dtype)
    weight, bias = torch.randn(V + 4, H).to(dtype), torch.randn(V + 4).to(dtype)
    head = LMHead(weight, bias, scale=0.7, softcap=5.0, vocab_size=V)
    z = whole_logits(hidden, head)
    assert z.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 1e-2}[dtype]
    assert_near_in_norm(z, dense_logits(hidden, head), tolerance)


@pytest.mark.parametrize("vocab", [60, 3000])
def test_the_bytes_are_told_before(vocab):
    model, steps = Tiny(vocab=vocab, width=16).float(), 12
    table, head = model.table.detach(), (4 * model.head).detach()
    reader = Reader(model.body, table, lambda: LMHead(head))
    prompts, mask, seeds = torch.randint(vocab, (2, 6)), torch.ones(2, 6, dtype=torch.long), torch.arange(2)

    def step() -> None:
        rollout = generate_whole(reader, prompts, mask, seeds, Sampling(steps), reference=reader)
        rollout.backward(torch.tanh(rollout.embedding(table).sum(1)).sum() + rollout.kl.sum())

    step()
    told = rollout_bytes(reader, 2, 6, steps)
    assert 0.7 * told < trace_allocations(step).peak < 1.1 * told
