"""PPO on sampled tokens: its advantages and its loss against dense float64."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from logitless.workbench.grade.config import GradeConfig
from logitless.workbench.grade.method import Batch, Task
from logitless.workbench.grade.methods import PPO, advantages, sample
from tests.support.workbench.micro import micro_model

BETA, T, K = 0.3, 5, 40


def rewards(soft: object, alive: Tensor) -> Tensor:
    return torch.tensor([0.9, -0.4, 0.2], dtype=torch.float64)


@pytest.fixture(scope="module")
def ppo() -> PPO:
    config = GradeConfig(method="ppo", completion_length=T, top_k=K, beta=BETA, lora_rank=0)
    model = micro_model(initializer_range=0.2).double().eval()
    frozen = micro_model(initializer_range=0.1).double().eval().requires_grad_(False)
    task = Task(config, model, frozen, rewards, 259, None)  # type: ignore[arg-type]
    method = PPO(task)
    method.value.double()
    torch.nn.init.normal_(method.value.weight, 0, 0.3)
    end = int(sample(task, batch()).soft.token[1, 1])  # what ends a sequence before the last step
    method.task = dataclasses.replace(task, end=end)
    return method


def batch() -> Batch:
    prompts = torch.tensor([[5, 6, 7], [8, 9, 10], [40, 41, 42]])
    return Batch(prompts, torch.ones_like(prompts), torch.tensor([3, 14, 15]))


def dense(method: PPO, prompts: Tensor, token: Tensor, ids: Tensor) -> SimpleNamespace:
    """Everything of whole logits: (B, T)."""
    model, frozen = method.task.model, method.task.frozen
    whole = torch.cat([prompts, token[:, :-1]], 1)
    found = model(whole, output_hidden_states=True)
    z, z_ref = found.logits[:, -T:], frozen(whole).logits[:, -T:]
    logp, logq = z.log_softmax(-1), z_ref.log_softmax(-1)
    best = z.gather(-1, ids).log_softmax(-1)
    return SimpleNamespace(
        logprob=best.masked_fill(ids != token[..., None], 0.0).sum(-1),
        kl=(logp.exp() * (logp - logq)).sum(-1),
        entropy=-(logp.exp() * logp).sum(-1),
        value=(found.hidden_states[-1][:, -T:] @ method.value.weight[0] + method.value.bias),
    )


def dense_loss(then: SimpleNamespace, now: SimpleNamespace, alive: Tensor) -> Tensor:
    """One sequence and token at a time, from the definitions."""
    total = torch.zeros((), dtype=torch.float64)
    for b, given in enumerate(rewards(None, alive).tolist()):
        n = int(alive[b].sum())
        gains = [-BETA * float(then.kl[b, t + 1]) if t + 1 < n else given for t in range(n)]
        values = [*then.value[b, :n].tolist(), 0.0]
        deltas = [gains[t] + 0.99 * values[t + 1] - values[t] for t in range(n)]
        for t in range(n):
            advantage = sum((0.99 * 0.95) ** i * deltas[t + i] for i in range(n - t))
            ratio = (now.logprob[b, t] - then.logprob[b, t]).exp()
            surrogate = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
            error = (now.value[b, t] - advantage - values[t]) ** 2
            total = total - surrogate + 0.5 * error - 0.01 * now.entropy[b, t] + BETA * now.kl[b, t]
    return total / alive.shape[0]


def test_the_loss_is_the_dense_one(ppo):
    given = batch()
    collected, outcome = ppo.collect(given)
    soft, alive = collected.rollout.soft, collected.rollout.alive
    with torch.no_grad():
        then = dense(ppo, given.prompts, soft.token, soft.ids)
        for p in ppo.task.model.parameters():  # so that some ratios leave the clipped range
            p.mul_(1.1)
    assert 0 < int((~alive).sum()) < alive.numel() / 2
    assert outcome.rewards == rewards(None, alive).tolist()
    torch.testing.assert_close(collected.logprob, then.logprob * alive)
    now = dense(ppo, given.prompts, soft.token, soft.ids)
    ratio = (now.logprob - then.logprob).exp()[alive]
    assert bool((ratio > 1.2).any())
    assert bool((ratio < 0.8).any())
    parameters = [*ppo.task.model.parameters(), *ppo.parameters()]
    exact = dense_loss(then, now, alive)
    wanted = torch.autograd.grad(exact, parameters)
    loss = ppo.loss(collected)
    torch.testing.assert_close(loss, exact, rtol=1e-6, atol=1e-7)
    for got, want in zip(torch.autograd.grad(loss, parameters), wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6 * float(want.abs().max()) + 1e-12)


def test_nothing_past_the_end_counts():
    alive = torch.tensor([[True, True, False], [True, True, True]])
    given = torch.tensor([[0.0, 1.0, 9.0], [0.0, 0.0, 2.0]])
    values = torch.tensor([[0.5, 0.25, 9.0], [0.0, 0.0, 0.0]])
    last = 1 - 0.25
    found = advantages(given, values, alive)
    assert found[0].tolist() == pytest.approx([0.99 * 0.25 - 0.5 + 0.99 * 0.95 * last, last, 0.0])
    assert found[1].tolist() == pytest.approx([2 * (0.99 * 0.95) ** 2, 2 * 0.99 * 0.95, 2.0])


def test_a_step_moves_the_parameters_four_times_and_a_checkpoint_keeps_the_values(ppo):
    moved: list[float] = []

    def apply() -> None:
        moved.append(float(ppo.value.weight.grad.norm()))
        for p in (*ppo.task.model.parameters(), *ppo.parameters()):
            p.grad = None

    assert len(ppo.step([batch(), batch()], 1.0, apply)) == 2
    assert len(moved) == 4
    assert all(norm > 0 for norm in moved)
    ppo.step([batch()], 1.0, apply)
    assert moved[:4] == pytest.approx(moved[4:])  # of the mean of batches
    kept = {name: x.clone() for name, x in ppo.state().items()}
    torch.nn.init.zeros_(ppo.value.weight)
    ppo.load(kept)
    assert bool(ppo.value.weight.any())
