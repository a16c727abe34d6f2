"""`sample_tokens` against whole rows: every field, every kind of head, every rule."""

import math

import pytest
import torch

import logitless as ll
from logitless.errors import NotFiniteError, OptionError, ShapeError
from logitless.sample import Noise
from logitless.sample.rules import Rules
from logitless.sample.tokens import draw_tokens
from tests.support.allocations import trace_allocations
from tests.support.sample.dense import compare, record_of, some_noise

V, H, N = 211, 8, 13
RULES = {
    "none": {},
    "hot": {"temperature": 1.7, "keep": 0},
    "greedy": {"temperature": 0.0},
    "top_k": {"top_k": 5, "temperature": 0.7},
    "top_k beyond keep": {"top_k": 90, "keep": 3},
    "top_k of more than there are": {"top_k": V + 9},
    "top_k of more than integers hold": {"top_k": 10**20, "top_p": 0.9},
    "top_p within": {"top_p": 0.3, "temperature": 0.6},
    "top_p far": {"top_p": 0.95, "temperature": 3.0},
    "top_p tiny": {"top_p": 1e-9},
    "min_p within": {"min_p": 0.2},
    "min_p far": {"min_p": 1e-4, "temperature": 2.0},
    "min_p of one": {"min_p": 1.0},
    "all": {"top_k": 40, "top_p": 0.8, "min_p": 0.02, "temperature": 1.3, "keep": V},
    "vLLM's order": {"top_p": 0.8, "min_p": 0.05, "order": "vllm"},
    "vLLM's order far": {"top_p": 0.9, "min_p": 1e-4, "temperature": 2.0, "order": "vllm"},
    "vLLM's order of all": {"top_k": 40, "top_p": 0.8, "min_p": 0.02, "temperature": 1.3, "order": "vllm"},
    "vLLM's order without min_p": {"top_p": 0.8, "temperature": 2.0, "order": "vllm"},
}
HEADS = {
    "plain": {},
    "softcap": {"softcap": 2.0},
    "scale": {"scale": 0.4},
    "bias": {"bias": True},
    "padded": {"vocab_size": 150},
    "adapter": {"adapter": True},
}


def problem(dtype=torch.float64, bias=False, adapter=False, **options):
    bias = torch.randn(V, dtype=dtype) if bias else None
    low = (ll.LowRank(torch.randn(3, H, dtype=dtype), torch.randn(V, 3, dtype=dtype), 0.5),) if adapter else ()
    head = ll.LMHead(torch.randn(V, H, dtype=dtype), bias, adapters=low, **options)
    return torch.randn(N, H, dtype=dtype), head


@pytest.mark.parametrize("rules", RULES.values(), ids=RULES)
@pytest.mark.parametrize("budget", [None, 30_000])
def test_every_rule(rules, budget):
    compare(*problem(), some_noise((N,)), 1e-10, memory_budget=budget, **rules)


@pytest.mark.parametrize("rules", [{}, {"top_p": 0.7}, {"top_p": 0.2}, {"min_p": 0.05}, {"top_p": 0.9, "min_p": 0.001},
    {"top_p": 0.9, "min_p": 0.001, "order": "vllm"}, {"top_p": 0.9, "min_p": 0.1, "order": "vllm"},
])  # fmt: skip
def test_a_top_k_beyond_what_is_retained(rules, monkeypatch):
    monkeypatch.setattr("logitless.algebra.rules.MOST_RETAINED", 16)
    compare(*problem(), some_noise((N,)), 1e-10, top_k=90, temperature=1.5, keep=2, **rules)


def test_the_orders_differ_in_what_top_p_is_a_share_of():
    hidden, head = problem()
    rules = {"top_p": 0.8, "min_p": 0.05, "noise": some_noise((N,))}
    theirs, vllms = (ll.sample_tokens(hidden, head, order=order, **rules) for order in ("transformers", "vllm"))
    assert (vllms.n_kept <= theirs.n_kept).all()
    assert (vllms.n_kept < theirs.n_kept).any()
    for alone in ({"top_p": 0.8}, {"min_p": 0.05}, {"top_k": 9, "min_p": 0.05}, {"top_k": 9, "top_p": 0.8}):
        a, b = (
            ll.sample_tokens(hidden, head, order=order, noise=rules["noise"], **alone)
            for order in ("transformers", "vllm")
        )
        assert torch.equal(a.n_kept, b.n_kept)
        assert torch.equal(a.behaviour_logprob, b.behaviour_logprob)


@pytest.mark.parametrize("head", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("rules", [{}, {"top_p": 0.9, "temperature": 1.5}], ids=["all", "nucleus"])
def test_every_head(head, rules):
    compare(*problem(**head), some_noise((N,)), 1e-10, **rules)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrow_operands(dtype):
    compare(*problem(dtype), some_noise((N,)), 1e-5, top_k=9, temperature=0.8)


def test_under_autocast():
    hidden, head = problem(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        record = ll.sample_tokens(hidden, head, temperature=0.0)
    narrow = ll.LMHead(head.weight.bfloat16())
    torch.testing.assert_close(
        record.logsumexp, ll.token_stats(hidden.bfloat16(), narrow, want=("logsumexp",)).logsumexp
    )


@pytest.mark.parametrize("temperature", [-1.0, math.nan, math.inf, 1e27, 1e-37, True, "1"])
def test_temperatures_that_are_refused(temperature):
    """At 1e26 every entry is as likely as any other, at 1e-24 the best one is certain."""
    hidden, head = torch.randn(3, 8), ll.LMHead(torch.randn(11, 8))
    with pytest.raises(OptionError, match=r"temperature: expected 0 \(greedy\) or a number in 1e-24..1e\+26, got"):
        ll.sample_tokens(hidden, head, temperature=temperature, noise=some_noise((3,)))
    with pytest.raises(OptionError, match=r"temperature: expected 0 \(greedy\) or numbers in 1e-24..1e\+26"):
        ll.sample_tokens(hidden, head, temperature=torch.tensor([0.0, 1.0, 1e-37]), noise=some_noise((3,)))
    with pytest.raises(OptionError, match=r"temperature: expected 0 \(greedy\) or numbers in 1e-24..1e\+26"):
        ll.sample_tokens(hidden, head, temperature=torch.tensor([0.0, 1.0, math.inf]).half(), noise=some_noise((3,)))
    for rules in ({}, {"top_p": 0.9}, {"top_k": 2}):
        cold = ll.sample_tokens(hidden, head, temperature=1e-24, noise=some_noise((3,)), **rules)
        assert cold.token.equal(ll.sample_tokens(hidden, head, temperature=0.0).token)
        assert cold.behaviour_logprob.tolist() == [0.0] * 3
    low = ll.LMHead(head.weight, torch.full((11,), -1e4))  # logits that are all negative are possible, too
    assert ll.sample_tokens(hidden, low, temperature=1e-24, noise=some_noise((3,))).token.equal(cold.token)
    drawn = ll.sample_tokens(hidden, head, temperature=1e26, noise=some_noise((3,)))
    assert drawn.logsumexp_at_temperature.tolist() == pytest.approx([math.log(11)] * 3, rel=1e-6)


@pytest.mark.parametrize("rules", [{}, {"top_k": 70}, {"top_p": 0.9}, {"top_p": 0.9, "min_p": 1e-3, "order": "vllm"}])
def test_under_another_default_device(rules):
    (hidden, head), noise = problem(), some_noise((N,))
    expected = ll.sample_tokens(hidden, head, noise=noise, **rules)
    with torch.device("meta"):
        found = ll.sample_tokens(hidden, head, noise=noise, **rules)
    assert found.token.equal(expected.token)
    assert found.behaviour_logprob.equal(expected.behaviour_logprob)


def test_temperature_per_token():
    heat = torch.tensor([0.0, 0.5, 1.0, 2.0] * 3 + [0.0], dtype=torch.float64)
    compare(*problem(), some_noise((N,)), 1e-10, temperature=heat, top_p=0.9)


@pytest.mark.parametrize("rules", [{}, {"top_k": 7}, {"top_p": 0.999}, {"temperature": 0.0}])
def test_extreme_logits_and_ties(rules):
    hidden, head = problem()
    equal = ll.LMHead(head.weight[torch.arange(V) // 4])  # four of each row
    compare(hidden, equal, some_noise((N,)), 1e-10, **rules)
    compare(300 * hidden, head, some_noise((N,)), 1e-9, **rules)
    compare(0 * hidden, head, some_noise((N,)), 1e-10, **rules)


@pytest.mark.parametrize("rules", [{}, {"top_k": 9}, {"top_p": 0.9}])
def test_entries_that_a_bias_forbids(rules):
    hidden, head = problem()
    bias = torch.full((V,), -math.inf, dtype=torch.float64)
    bias[[3, 50, 200]] = 0.0
    noise = some_noise((N,))
    compare(hidden, ll.LMHead(head.weight, bias), noise, 1e-10, keep=3, **rules)
    assert ll.sample_tokens(hidden, ll.LMHead(head.weight, bias), noise=noise).n_kept.tolist() == [3] * N


@pytest.mark.parametrize("rules", [{}, {"top_k": 150}, {"top_p": 0.999}, {"top_p": 0.9, "min_p": 0.1}])
@pytest.mark.parametrize("temperature", [1.5, 1e26])
def test_a_bias_forbids_at_any_temperature(temperature, rules, monkeypatch):
    """Also where whole rows are looked at, past the best entries."""
    monkeypatch.setattr("logitless.algebra.rules.MOST_RETAINED", 16)
    hidden, head = problem()
    bias = torch.where(torch.arange(V) % 2 == 0, -math.inf, 0.0).double()
    noise = some_noise((N,))
    compare(hidden, ll.LMHead(head.weight, bias), noise, 1e-10, temperature=temperature, keep=3, **rules)


def test_a_budget_of_any_size():
    """Of more bytes than torch's whole numbers hold, where rows are read whole, too."""
    (hidden, head), noise = problem(), some_noise((N,))
    usual, huge = (
        ll.sample_tokens(hidden, head, noise=noise, top_p=0.99, temperature=3.0, memory_budget=budget)
        for budget in (None, 2**80)
    )
    assert torch.equal(usual.token, huge.token)


@pytest.mark.parametrize("spread", [0.0, 0.01, 1.0, 20.0])
@pytest.mark.parametrize("budget", [None, 200_000])
def test_noise_for_some_is_noise_for_all(spread, budget):
    """Only what noise can lift above the best is looked at: flat rows, peaked ones, and one with two peaks."""
    hidden, head = torch.randn(6, H), ll.LMHead(spread * torch.randn(9_000, H))
    noise = Noise(torch.arange(6), torch.arange(6))
    heat = torch.tensor([0.0, 0.1, 0.5, 1.0, 2.0, 30.0])
    z = hidden @ head.weight.T / torch.where(heat == 0, 1.0, heat)[:, None]
    noisy = z + (heat > 0)[:, None] * noise.gumbel(slice(0, 9_000))
    options = {"temperature": heat, "keep": 0, "noise": noise, "memory_budget": budget}
    record = ll.sample_tokens(hidden, head, **options)
    assert torch.equal(record.token.long(), noisy.argmax(1))
    unchanged = draw_tokens(hidden, head, Rules(), change=lambda z: z, **options)
    assert torch.equal(unchanged.token, record.token)


def test_changed_logits():
    """The record is of the raw rows, and its behaviour log-prob of the changed ones."""
    hidden, head = problem(bias=True)
    noise = some_noise((N,))
    z = hidden @ head.weight.T + head.bias

    def change(z):
        z[:, 50:] = -math.inf
        z[:, :9] *= 3
        return z

    near = {"rtol": 1e-10, "atol": 1e-10}
    for rules, heat in (({}, 1.0), ({"top_p": 0.8}, 0.7), ({"top_k": 5}, 1.0), ({}, 0.0)):
        options = {"temperature": heat, "noise": noise, "keep": 4, "memory_budget": 1000}
        got = draw_tokens(hidden, head, Rules(**rules), change=change, **options)
        raw = ll.sample_tokens(hidden, head, **options)
        changed = record_of(change(z.clone()), noise, heat, **rules)
        ids = changed["token"]
        assert torch.equal(got.token.long(), ids)
        for name in ("topk_logits", "topk_ids", "logsumexp", "mean_logit", "entropy"):
            torch.testing.assert_close(getattr(got, name), getattr(raw, name), **near)
        torch.testing.assert_close(got.logprob, z.log_softmax(1).gather(1, ids[:, None])[:, 0], **near)
        assert torch.equal(got.rank.long(), 1 + (z > z.gather(1, ids[:, None])).sum(1))
        assert torch.equal(got.n_kept.long(), changed["n_kept"])
        torch.testing.assert_close(got.log_kept_mass, changed["log_kept_mass"], **near)
        if heat:
            lost = changed["logsumexp_at_temperature"] + changed["log_kept_mass"]
            torch.testing.assert_close(got.behaviour_logprob, changed["token_logit"] / heat - lost, **near)
    none_in_a_row = torch.tensor([5])
    for wrong, error in (
        (lambda z: z[:, 1:], ShapeError),
        (lambda z: z.index_fill(0, none_in_a_row, -math.inf), NotFiniteError),
    ):
        with pytest.raises(error, match="logits processors"):
            draw_tokens(hidden, head, Rules(), change=wrong)


def test_a_change_sees_which_entries_a_bias_forbids():
    hidden, head = problem(bias=True)
    head.bias[[3, 150]] = -math.inf
    seen = []
    draw_tokens(hidden, head, Rules(), change=lambda z: seen.append(z.isneginf()) or z)
    assert [x.all(0).nonzero().flatten().tolist() for x in seen] == [[3, 150]]
    assert int(seen[0].sum()) == 2 * N


@pytest.mark.parametrize("rules", [{}, {"top_p": 0.9}, {"top_k": 20}])
def test_a_token_depends_on_its_own_seed_and_position_only(rules):
    hidden, head = problem()
    noise = some_noise((N,))
    whole = ll.sample_tokens(hidden, head, noise=noise, **rules)
    order = torch.randperm(N)
    shuffled = ll.sample_tokens(
        hidden[order], head, noise=Noise(*(x[order] for x in noise)), memory_budget=20_000, **rules
    )
    assert torch.equal(shuffled.token, whole.token[order])
    one = ll.sample_tokens(hidden[4], head, noise=Noise(*(x[4] for x in noise)), **rules)
    assert one.shape == ()
    assert one.token == whole.token[4]


def test_two_completions_of_one_prompt_differ():
    hidden, head = problem()
    same = (0.3 * hidden[:1]).expand(8, H)
    seeds = torch.arange(8)
    assert len(set(ll.sample_tokens(same, head, noise=Noise(seeds, torch.zeros_like(seeds))).token.tolist())) > 4
    drawn = [ll.sample_tokens(same, head, generator=torch.Generator().manual_seed(s)).token for s in (1, 1, 2)]
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])


@pytest.mark.parametrize(
    "rules", [{}, {"temperature": 0.7, "top_p": 0.9}, {"top_k": 12}], ids=["all", "top_p", "top_k"]
)
def test_the_distribution(rules):
    """Chi-square and Kolmogorov-Smirnov against the dense probabilities, at about five sigma."""
    hidden, head = torch.randn(1, H), ll.LMHead(0.7 * torch.randn(40, H))
    n = 20_000
    noise = Noise(torch.arange(n), torch.zeros(n, dtype=torch.long))
    record = ll.sample_tokens(hidden.expand(n, H), head, noise=noise, keep=40, **rules)
    p = torch.zeros(40, dtype=torch.float64)
    first = record[0]
    kept = first.topk_ids[: int(first.n_kept)].long()
    x = first.topk_logits[: int(first.n_kept)].double() / rules.get("temperature", 1.0)
    p[kept] = x.softmax(0)
    count = torch.bincount(record.token, minlength=40).double()
    assert count[p == 0].sum() == 0
    often = p * n > 5
    chi = ((count - n * p).square() / (n * p))[often].sum()
    freedom = int(often.sum()) - 1
    assert chi < freedom + 5 * math.sqrt(2 * freedom)
    assert (count.cumsum(0) / n - p.cumsum(0)).abs().max() < 2.6 / math.sqrt(n)
    behaviour = p.log()[record.token.long()]
    torch.testing.assert_close(record.behaviour_logprob.double(), behaviour, rtol=1e-5, atol=1e-5)


def test_memory_holds_a_few_rows():
    n, v, budget = 64, 32_768, 1 << 20  # an eighth of the logits
    hidden, head = torch.randn(n, H), ll.LMHead(torch.randn(v, H))
    for rules in ({}, {"top_p": 0.99, "temperature": 5.0}, {"top_k": 2000, "top_p": 0.9}):
        got = trace_allocations(lambda rules=rules: ll.sample_tokens(hidden, head, memory_budget=budget, **rules))
        assert got.peak < 2 * budget  # with the noise, and what is kept
        assert got.kept < 200 * n


def test_no_token_at_all():
    _, head = problem()
    assert ll.sample_tokens(torch.zeros(2, 0, H, dtype=torch.float64), head, top_p=0.5).shape == (2, 0)


def test_a_model_that_diverged():
    hidden, head = problem()
    hidden[3, 2] = math.nan
    with pytest.raises(NotFiniteError, match="diverged"):
        ll.sample_tokens(hidden, head)
