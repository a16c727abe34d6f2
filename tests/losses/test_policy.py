"""Policy losses, KL penalties and batch weights against their dense formulas."""

import math

import pytest
import torch
import torch.nn.functional as F

from logitless import losses
from logitless.errors import OptionError, ShapeError
from tests.support.losses.comparing import N, assert_same, problem, stats_of


@pytest.fixture
def rollout():
    """Logits, labels, and ratios on both sides of every clip with advantages of both signs."""
    z, labels = problem(64)
    logprob = stats_of(z, labels).logprob.detach()
    old = logprob - 0.6 * torch.randn(64, dtype=torch.float64)
    advantages = torch.randn(64, dtype=torch.float64, requires_grad=True)
    ratio = (logprob - old).exp()
    for side in (ratio < 0.8, (ratio > 0.8) & (ratio < 1.2), ratio > 1.3):
        assert (side & (advantages > 0)).any()
        assert (side & (advantages < 0)).any()
    return z, labels, old, advantages


def clipped(z, labels, old, advantages, low, high):
    """The clipped objective case by case, from probabilities."""
    p = z.softmax(-1)[torch.arange(len(labels)), labels]
    ratio = p / old.exp()
    cut_above = (advantages > 0) & (ratio > 1 + high)
    cut_below = (advantages < 0) & (ratio < 1 - low)
    ratio = torch.where(cut_above, 1 + high, torch.where(cut_below, 1 - low, ratio))
    return -advantages * ratio


def test_reinforce(rollout):
    z, labels, _, advantages = rollout
    assert_same(
        lambda z, a: losses.reinforce(stats_of(z, labels).logprob, a),
        lambda z, a: a * F.cross_entropy(z, labels, reduction="none"),
        z,
        advantages,
    )


@pytest.mark.parametrize(("low", "high"), [(0.2, 0.2), (0.1, 0.3), (1.0, 4.0)])
def test_ppo_clip(rollout, low, high):
    z, labels, old, advantages = rollout
    assert_same(
        lambda z, o, a: losses.ppo_clip(stats_of(z, labels).logprob, o, a, low, high),
        lambda z, o, a: clipped(z, labels, o, a, low, high),
        *(z, old, advantages),
    )


def test_grpo_with_a_reference(rollout):
    z, labels, old, advantages = rollout
    ref = old + 0.3 * torch.randn_like(old)

    def dense(z, o, a, r):
        p = z.softmax(-1)[torch.arange(len(labels)), labels]
        return clipped(z, labels, o, a, 0.2, 0.2) + 0.04 * (r.exp() / p - (r - p.log()) - 1)

    assert_same(lambda z, o, a, r: losses.grpo(stats_of(z, labels).logprob, o, a, r), dense, z, old, advantages, ref)


def test_the_clipped_family_differs_in_its_clip(rollout):
    z, labels, old, advantages = rollout
    for ours, low, high in ((losses.grpo, 0.2, 0.2), (losses.dapo, 0.2, 0.28), (losses.dr_grpo, 0.2, 0.2)):
        assert_same(
            lambda z, o, a, ours=ours: ours(stats_of(z, labels).logprob, o, a),
            lambda z, o, a, low=low, high=high: clipped(z, labels, o, a, low, high),
            *(z, old, advantages),
        )


def test_cispo_clips_the_weight_and_keeps_the_gradient(rollout):
    z, labels, old, advantages = rollout

    def dense(z, o, a):
        p = z.softmax(-1)[torch.arange(len(labels)), labels]
        weight = torch.clamp(p.detach() / o.exp(), 0.9, 1.3)
        return -weight * a * p.log()

    assert_same(lambda z, o, a: losses.cispo(stats_of(z, labels).logprob, o, a, 0.1, 0.3), dense, z, old, advantages)
    logprob = torch.zeros(2, requires_grad=True)
    losses.cispo(logprob, torch.tensor([-5.0, 0.0]), torch.ones(2)).sum().backward()
    assert logprob.grad.tolist() == [-5.0, -1.0]


def test_two_sided_clip(rollout):
    """Rollouts so unlikely that the ratio passes delta, with advantages of both signs."""
    z, labels, old, advantages = rollout
    old = old - 1.5

    def dense(z, o, a):
        r = z.softmax(-1)[torch.arange(len(labels)), labels] / o.exp()
        assert ((r > 2) & (a < 0)).any()
        one_sided = clipped(z, labels, o, a, 0.2, 0.3)
        return torch.where((a < 0) & (r > 2), -a * 2.0, one_sided)

    def ours(z, o, a):
        return losses.ppo_clip(stats_of(z, labels).logprob, o, a, 0.2, 0.3, delta=2.0)

    assert_same(ours, dense, z, old, advantages)
    logprob = stats_of(z, labels).logprob
    a = losses.grpo(logprob, old, advantages, clip=0.2, delta=2.0)
    torch.testing.assert_close(a, losses.ppo_clip(logprob, old, advantages, delta=2.0))


def test_cispo_of_an_impossible_token_is_nothing():
    logprob = torch.tensor([-math.inf, -1.0, math.nan], requires_grad=True)
    loss = losses.cispo(logprob, torch.tensor([-1.0, -1.0, -1.0]), torch.tensor([2.0, 2.0, 2.0]))
    (grad,) = torch.autograd.grad(loss[:2].sum(), logprob, retain_graph=True)
    assert loss[:2].tolist() == [0.0, 2.0]
    assert grad[:2].tolist() == [0.0, -2.0]
    assert loss[2].isnan()


@pytest.mark.parametrize("bound", [0.7, 1.0, 5.0])
def test_cispo_takes_the_bound_itself(rollout, bound):
    z, labels, old, advantages = rollout

    def dense(z, o, a):
        p = z.softmax(-1)[torch.arange(len(labels)), labels]
        return -(p.detach() / o.exp()).clamp(max=bound) * a * p.log()

    def ours(z, o, a):
        return losses.cispo(stats_of(z, labels).logprob, o, a, epsilon_high=bound)

    assert_same(ours, dense, z, old, advantages)


def test_sapo(rollout):
    z, labels, old, advantages = rollout

    def dense(z, o, a):
        r = z.softmax(-1)[torch.arange(len(labels)), labels] / o.exp()
        gates = [4 / t / (1 + (t * (1 - r)).exp()) for t in (0.7, 1.3)]
        return -a * torch.where(a > 0, *gates)

    assert_same(lambda z, o, a: losses.sapo(stats_of(z, labels).logprob, o, a, 0.7, 1.3), dense, z, old, advantages)
    logprob = torch.zeros(2, requires_grad=True)
    losses.sapo(logprob, torch.zeros(2), torch.tensor([1.0, -1.0])).sum().backward()
    assert logprob.grad.tolist() == pytest.approx([-1.0, 1.0])


@pytest.fixture
def responses():
    """Log-probs and old ones of responses of unlike lengths, one of them empty, advantages of both signs."""
    logprob = (-3 * torch.rand(8, 5, dtype=torch.float64)).requires_grad_()
    old = logprob.detach() + 0.8 * torch.randn(8, 5, dtype=torch.float64)
    lengths = torch.tensor([5, 1, 3, 0, 2, 5, 4, 4])
    advantages = torch.tensor([1.0, -1.0, 0.5, 1.0, -2.0, -1.0, 0.7, -0.3], dtype=torch.float64)
    return logprob, old, advantages, torch.arange(5) < lengths[:, None]


def test_gspo(responses):
    logprob, old, advantages, mask = responses

    def dense(p, o, a):
        out = []
        for i, n in enumerate(mask.sum(-1).tolist()):
            r = (p[i, :n].exp().prod() / o[i, :n].exp().prod()) ** (1 / max(n, 1))
            out.append(-min(a[i] * r, a[i] * r.clamp(0.9, 1.2)))
        return torch.stack(out)

    assert_same(lambda p, o, a: losses.gspo(p, o, a, mask, 0.1, 0.2), dense, logprob, old, advantages)


@pytest.mark.parametrize("clip", [0.3, 0.0])  # 0: no ratio counts on the side that gains
def test_gmpo(responses, clip):
    logprob, old, advantages, mask = responses

    def dense(p, o, a):
        out = []
        for i, n in enumerate(mask.sum(-1).tolist()):
            kept = torch.ones((), dtype=p.dtype)
            for t in range(n):
                r = p[i, t].exp() / o[i, t].exp()
                kept = kept * (r.clamp(max=math.exp(clip)) if a[i] > 0 else r.clamp(min=math.exp(-clip)))
            out.append(-a[i] * kept ** (1 / max(n, 1)))
        return torch.stack(out)

    assert_same(lambda p, o, a: losses.gmpo(p, o, a, mask, clip), dense, logprob, old, advantages)


@pytest.mark.parametrize("loss", [losses.gspo, losses.gmpo])
def test_a_response_far_from_its_policy_stays_finite(loss):
    """Nothing clips a ratio above 1 where the advantage is negative: e^200 counts as e^79."""
    logprob, old = torch.zeros(2, 3, requires_grad=True), torch.full((2, 3), -200.0)
    found = loss(logprob, old, torch.tensor([-1.0, -0.5]), torch.ones(2, 3))
    assert found[0].log().floor() == 79
    assert torch.autograd.grad(found.sum(), logprob)[0].isfinite().all()


@pytest.mark.parametrize("loss", [losses.gspo, losses.gmpo])
def test_a_batch_of_responses_without_tokens(loss):
    """Each has the ratio 1, as a response without tokens beside others has."""
    nothing, advantages = torch.zeros(2, 0, requires_grad=True), torch.tensor([1.0, -0.5])
    found = loss(nothing, nothing.detach(), advantages, torch.zeros(2, 0, dtype=torch.bool))
    assert found.tolist() == [-1.0, 0.5]
    found.sum().backward()
    assert losses.sequence_logprob(nothing, average=True).tolist() == [0.0, 0.0]


ON_BATCHES = {
    "reinforce": lambda p, o, a, r, m: losses.reinforce(p, a),
    "ppo_clip": lambda p, o, a, r, m: losses.ppo_clip(p, o, a, delta=4.0),
    "grpo": lambda p, o, a, r, m: losses.grpo(p, o, a, r),
    "dapo": lambda p, o, a, r, m: losses.dapo(p, o, a),
    "dr_grpo": lambda p, o, a, r, m: losses.dr_grpo(p, o, a),
    "cispo": lambda p, o, a, r, m: losses.cispo(p, o, a),
    "sapo": lambda p, o, a, r, m: losses.sapo(p, o, a),
    "kl_k1": lambda p, o, a, r, m: losses.kl_k1(p, r),
    "kl_k2": lambda p, o, a, r, m: losses.kl_k2(p, r),
    "kl_k3": lambda p, o, a, r, m: losses.kl_k3(p, r),
    "gspo": lambda p, o, a, r, m: losses.gspo(p, o, a[:, 0], m)[:, None].expand_as(p),
    "gmpo": lambda p, o, a, r, m: losses.gmpo(p, o, a[:, 0], m)[:, None].expand_as(p),
}


@pytest.mark.parametrize("junk", [-torch.inf, torch.inf, -3e38, -1e9, -100.0, 100.0, 1e30])
@pytest.mark.parametrize("name", ON_BATCHES)
def test_ignored_tokens_end_in_their_weight(name, junk):
    """On whole batches, whatever old and reference log-probs an ignored token has: value and slopes as without it."""
    mask = torch.arange(6) < torch.tensor([[6], [3], [0], [5]])
    logprob = torch.where(mask, -3 * torch.rand(4, 6), 0.0)
    advantages = torch.randn(4, 1).expand(4, 6)
    found = []
    for fill in (0.0, junk):
        old, ref = (torch.where(mask, logprob + d, fill) for d in (0.1, -0.2))
        for whole in (
            lambda loss: losses.batch_loss(loss, mask, "sequence"),
            lambda loss: (losses.token_weights(mask, "sequence") * loss).sum(),
        ):
            leaf = logprob.clone().requires_grad_()
            total = whole(ON_BATCHES[name](leaf, old, advantages, ref, mask))
            found.append((total.detach(), torch.autograd.grad(total, leaf)[0] * mask))
    for each in found[1:]:
        torch.testing.assert_close(each, found[0])


def test_a_nan_under_the_mask_does_not_reach_the_batch_loss():
    loss, mask = torch.tensor([[1.0, torch.nan], [3.0, torch.inf]]), torch.tensor([[1, 0], [1, 0]])
    assert losses.batch_loss(loss, mask, "token").item() == 2.0
    for dtype in (torch.float64, torch.bfloat16):
        assert losses.batch_loss(loss.to(dtype), mask, "constant", 4).dtype == dtype
    with pytest.raises(ShapeError, match="mask"):
        losses.batch_loss(loss, mask[0], "token")


@pytest.mark.parametrize("d", [-1e38, -3e10, -1e6, -50.0, 60.0])
def test_k3_far_from_agreement(d):
    logprob = torch.zeros(1, requires_grad=True)
    k3 = losses.kl_k3(logprob, torch.tensor([d]))
    torch.testing.assert_close(k3.item(), math.expm1(max(d, -1e18)) - max(d, -9.223372e18), rtol=1e-5, atol=0)
    (slope,) = torch.autograd.grad(k3, logprob)
    torch.testing.assert_close(slope.item(), -math.expm1(d) if d > -1e18 else 0.0, rtol=1e-5, atol=0)


def test_sampled_kls():
    z, labels = problem()
    ref = stats_of(z, labels).logprob.detach() + torch.randn(N, dtype=torch.float64)
    for ours, dense in (
        (losses.kl_k1, lambda t: -t.log()),
        (losses.kl_k2, lambda t: t.log() ** 2 / 2),
        (losses.kl_k3, lambda t: t - 1 - t.log()),
    ):  # t = reference / policy
        assert_same(
            lambda z, r, ours=ours: ours(stats_of(z, labels).logprob, r),
            lambda z, r, dense=dense: dense(r.exp() / z.softmax(-1)[torch.arange(N), labels]),
            *(z, ref),
        )


def test_sampled_kls_average_to_the_exact_one():
    z, z_ref = torch.randn(2, 9, dtype=torch.float64)
    p, logp, logq = z.softmax(-1), z.log_softmax(-1), z_ref.log_softmax(-1)
    exact = (p * (logp - logq)).sum()
    for estimate in (losses.kl_k1, losses.kl_k3):
        torch.testing.assert_close((p * estimate(logp, logq)).sum(), exact)


@pytest.mark.parametrize("d", [1e-7, -1e-5, 1e-3, 9.9e-3, 1.01e-2, -0.3, 5.0])
def test_k3_keeps_its_digits_near_agreement(d):
    logprob = torch.zeros(1, requires_grad=True)
    ref = torch.tensor([d])
    d = ref.double().item()
    exact = d * d * (0.5 + d / 6 + d * d / 24 + d**3 / 120) if abs(d) < 1e-2 else math.exp(d) - 1 - d
    k3 = losses.kl_k3(logprob, ref)
    assert k3.item() >= 0
    torch.testing.assert_close(k3.item(), exact, rtol=2e-5, atol=0)
    torch.testing.assert_close(torch.autograd.grad(k3, logprob)[0].item(), -math.expm1(d), rtol=1e-5, atol=0)


@pytest.mark.parametrize("d", [1e-5, -1e-3, 9.9e-3, -9.9e-3, 1.01e-2])
def test_k3_keeps_the_digits_of_float64(d):
    exact = math.fsum(d**n / math.factorial(n) for n in range(2, 12))
    k3 = losses.kl_k3(torch.zeros(1, dtype=torch.float64), torch.tensor([d], dtype=torch.float64))
    torch.testing.assert_close(k3.item(), exact, rtol=2e-13, atol=0)


def test_exact_kl_and_entropy_bonus():
    z, labels = problem()
    z_ref = torch.randn_like(z)

    def dense_kl(z):
        return 0.2 * F.kl_div(z_ref.log_softmax(-1), z.log_softmax(-1), reduction="none", log_target=True).sum(-1)

    assert_same(lambda z: losses.kl_exact(stats_of(z, labels, z_ref.to(z.dtype)).kl, 0.2), dense_kl, z)
    assert_same(
        lambda z: losses.entropy_bonus(stats_of(z, labels).entropy, 0.05),
        lambda z: -0.05 * torch.distributions.Categorical(logits=z).entropy(),
        z,
    )


def test_group_advantages():
    rewards = torch.tensor([[1.0, 0.0, 0.0, 1.0], [3.0, 3.0, 3.0, 3.0]])
    spread = math.sqrt(4 * 0.25 / 3)
    scaled = losses.group_advantages(rewards)
    torch.testing.assert_close(scaled[0], torch.tensor([0.5, -0.5, -0.5, 0.5]) / (spread + 1e-4))
    assert scaled[1].tolist() == [0.0] * 4
    assert losses.group_advantages(rewards, scale=False)[0].tolist() == [0.5, -0.5, -0.5, 0.5]
    assert losses.group_advantages(torch.tensor([[2.0]])).tolist() == [[0.0]]
    torch.testing.assert_close(
        losses.group_advantages(torch.tensor([[3.0, 1.0]]), epsilon=0.0), torch.tensor([[1, -1]]) / math.sqrt(2)
    )
    assert losses.group_advantages(rewards.double()).dtype == torch.float64
    whole = torch.tensor([[1, 0, 0, 1]])
    assert torch.equal(losses.group_advantages(whole), losses.group_advantages(whole.float()))


def test_token_weights_give_each_papers_batch_loss():
    loss = torch.randn(3, 5, dtype=torch.float64)
    mask = torch.tensor([[1, 1, 0, 0, 0], [1, 1, 1, 1, 1], [0, 0, 0, 0, 0]])
    first, second = loss[0, :2], loss[1]
    expected = {
        "sequence": (first.mean() + second.mean() + 0) / 3,
        "token": torch.cat([first, second]).mean(),
        "constant": torch.cat([first, second]).sum() / (3 * 10),
    }
    for scheme, batch in expected.items():
        weights = losses.token_weights(mask.double(), scheme, length=10)
        torch.testing.assert_close((weights * loss).sum(), batch)
        assert weights.dtype == torch.float64
        for dtype in (torch.bool, torch.int64, torch.bfloat16):
            assert losses.token_weights(mask.to(dtype), scheme, length=10).dtype == torch.float32


def test_nothing_to_weigh():
    for scheme in ("sequence", "token", "constant"):
        assert losses.token_weights(torch.zeros(2, 3), scheme, length=4).tolist() == [[0.0] * 3] * 2
        assert losses.token_weights(torch.zeros(0, 3), scheme, length=4).shape == (0, 3)


def test_bad_input_is_named():
    x = torch.zeros(3, 3)
    with pytest.raises(ShapeError, match=r"advantages.*\(3, 3\).*\(3,\)"):
        losses.reinforce(x, torch.zeros(3))
    for clips in ({"clip_low": 1.5}, {"clip_low": -0.1}, {"clip_high": -0.1}):
        with pytest.raises(OptionError, match="clip_low"):
            losses.ppo_clip(x, x, x, **clips)
    assert losses.ppo_clip(x, x, x, clip_low=0.0, clip_high=0.0).shape == x.shape
    for delta in (1.1, 1.2):
        with pytest.raises(OptionError, match=rf"delta must be above 1 \+ clip_high = 1.2, got {delta}"):
            losses.ppo_clip(x, x, x, delta=delta)
    for bound, low in ((0.0, 1.0), (-1.0, 1.0), (0.5, 0.2), (float("nan"), 1.0)):
        with pytest.raises(OptionError, match="epsilon_high"):
            losses.cispo(x, x, x, clip_low=low, epsilon_high=bound)
    for temperatures in ((0.0, 1.0), (1.0, 0.0)):
        with pytest.raises(OptionError, match="temperature_positive"):
            losses.sapo(x, x, x, *temperatures)
    for clip in (-1.0, math.nan):
        with pytest.raises(OptionError, match=f"^clip must be at least 0, got {clip}$"):
            losses.gmpo(x, x, x[0], x, clip)
    for loss in (losses.gspo, losses.gmpo):
        with pytest.raises(ShapeError, match=r"^advantages must have one number per response, \(2,\), got \(2, 3\)"):
            loss(*torch.zeros(4, 2, 3))
        with pytest.raises(ShapeError, match="mask"):
            loss(x, x, x[0], x[0])
    with pytest.raises(OptionError, match="scheme"):
        losses.token_weights(x, "mean")  # type: ignore[arg-type]
    for length in (None, 0):
        with pytest.raises(OptionError, match="length"):
            losses.token_weights(x, "constant", length)
    assert losses.token_weights(torch.ones(1, 1), "constant", 1).item() == 1.0
