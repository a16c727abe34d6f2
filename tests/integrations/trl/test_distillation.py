"""The generalised JSD of distillation: its value, its gradients and the entropy against dense float64."""

from functools import partial

import pytest
import torch
from transformers import MiniCPM3Config, MiniCPM3ForCausalLM

from logitless.integrations.trl.distillation import divergence
from logitless.integrations.trl.trainers import install
from logitless.vocab.head.lm_head import LMHead
from tests.support.allocations import trace_allocations
from tests.support.integrations.tiny import LATENT, TINY, WIDTH
from tests.support.integrations.trl import runs

N, H, V = 9, 8, 53


def problem():
    hidden = torch.randn(N, H, dtype=torch.float64, requires_grad=True)
    head = LMHead(torch.randn(V, H, dtype=torch.float64, requires_grad=True))
    return hidden, head, (torch.randn(N, H, dtype=torch.float64), LMHead(torch.randn(V, H, dtype=torch.float64)))


def dense(hidden, head, mask, teacher, beta, temperature):
    p, q = ((h @ w.weight.T / temperature).log_softmax(-1) for h, w in ((hidden, head), teacher))
    m = torch.log((1 - beta) * p.exp() + beta * q.exp())
    kl_p, kl_q = ((x.exp() * (x - m)).sum(-1) for x in (p, q))
    of_tokens = kl_q if beta == 0 else kl_p if beta == 1 else (1 - beta) * kl_p + beta * kl_q
    return (of_tokens * mask).sum(), -(p.exp() * p).sum(-1)[mask != 0].sum()


@pytest.mark.parametrize("beta", [0.0, 0.3, 0.5, 1.0])
def test_equals_the_dense_divergence(beta):
    hidden, head, teacher = problem()
    mask = torch.tensor([1, 0, 1, 1, 1, 0, 1, 1, 1])
    found, expected = (of(hidden, head, mask, teacher, beta, 0.7) for of in (ours, dense))
    torch.testing.assert_close(found, expected)
    assert not found[1].requires_grad
    leaves = [hidden, head.weight]
    torch.testing.assert_close(*(torch.autograd.grad(x, leaves) for x in (found[0], expected[0])))


def ours(hidden, head, mask, teacher, beta, temperature):
    return divergence(head, hidden, mask, teacher, beta, temperature)


def test_no_token_that_counts_is_nothing_with_a_graph():
    hidden, head, teacher = problem()
    loss, entropy = divergence(head, hidden, torch.zeros(N), teacher, 0.3)
    assert float(loss.detach()) == float(entropy) == 0.0
    loss.backward()
    assert not hidden.grad.any()


@pytest.mark.parametrize("name", ["phi-bias", "gemma2-softcap", "granite-scaling"])
def test_a_teacher_with_a_head_of_another_kind(place, monkeypatch, name):
    monkeypatch.setattr(runs, "teacher", lambda: TINY[name].build(vocab=259).float().eval())
    runs.assert_same_training(partial(runs.distillation, place, max_steps=2))


def test_a_student_that_divides_before_its_head(place):
    """TRL takes the body's own output, and has the number as a scale of the logits."""
    sizes = {**WIDTH, **LATENT, "vocab_size": 259, "dim_model_base": 4}
    del sizes["moe_intermediate_size"]

    def student():
        torch.manual_seed(0)
        return MiniCPM3ForCausalLM(MiniCPM3Config(**sizes))

    runs.assert_same_training(lambda: runs.distillation(place, student(), max_steps=2))


def test_it_divides_by_the_items_that_it_is_given(place):
    trainer = runs.distillation(place)
    install(trainer)
    batch = trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))
    (mean, _, valid), (sixteenth, *_) = (trainer._compute_loss(trainer.model, batch, n) for n in (None, 16))
    assert valid == batch["completion_mask"].sum()
    torch.testing.assert_close(sixteenth * 16, mean * valid)


def test_the_budget_is_kept(tmp_path, monkeypatch):
    place = runs.saved_model(tmp_path, vocab_size=4096)
    monkeypatch.setattr(runs, "teacher", lambda: runs.micro(place))
    trainer = runs.distillation(place)
    install(trainer, memory_budget=1 << 16)
    batch = trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))
    traced = trace_allocations(lambda: trainer.compute_loss(trainer.model, batch).backward())
    assert traced.peak <= 4 * 4096 * 32 * 4  # of the head's gradients; the default budget's slices are more
