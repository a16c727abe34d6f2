"""Records from whole rows of logits in float64: what `sample_tokens` is held against."""

import math
from typing import Any

import torch
from torch import Tensor

import logitless as ll
from logitless.sample import Noise
from logitless.vocab.reference import dense_logits


def some_noise(lead: tuple[int, ...]) -> Noise:
    return Noise(torch.randint(2**62, lead), torch.randint(100, lead))


def kept_mask(z: Tensor, temperature: Tensor, rules: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """(logits divided by temperature, the same with what is not kept at -inf), row by row, in plain Python."""
    top_k, top_p, min_p = int(rules.get("top_k", 0)), rules.get("top_p", 1.0), rules.get("min_p", 0.0)
    x = z / temperature[:, None]
    if rules.get("order") == "vllm":
        return x, vllm_kept(x, top_k, top_p, min_p)
    out = torch.full_like(x, -math.inf)
    for n in range(x.shape[0]):
        order = sorted(range(x.shape[1]), key=lambda v: (-float(z[n, v]), v))
        order = [v for v in order[: top_k or None] if x[n, v] > -math.inf]
        total = float(x[n, order].logsumexp(0))
        before, kept = 0.0, []
        for v in order:
            p = math.exp(float(x[n, v]) - total)
            if (top_p < 1 and before >= top_p) or p < min_p * math.exp(float(x[n, order[0]]) - total):
                break
            kept.append(v)
            before += p
        out[n, kept] = x[n, kept]
    return x, out


def vllm_kept(x: Tensor, top_k: int, top_p: float, min_p: float) -> Tensor:
    """The same by the steps of vLLM's sampler as its documentation has them: min_p, then top_k, then top_p.

    Each masks with -inf what it does not keep, and the next one's probabilities are the softmax of what is left.
    """
    p = x.softmax(1)
    x = x.masked_fill(p < min_p * p.amax(1, keepdim=True), -math.inf)
    best, order = x.sort(dim=1, descending=True, stable=True)
    if top_k:
        best[:, top_k:] = -math.inf
    if top_p < 1:
        p = best.softmax(1)
        best = best.masked_fill(p.cumsum(1) - p >= top_p, -math.inf)
    return torch.full_like(x, -math.inf).scatter_(1, order, best)


def dense_record(
    hidden: Tensor,  # (N, H)
    head: ll.LMHead,
    noise: Noise,
    temperature: float | Tensor = 1.0,
    keep: int = 10,
    **rules: Any,
) -> dict[str, Tensor]:
    """Every field of the record by name; rules: top_k, top_p, min_p, order."""
    return record_of(dense_logits(hidden.double(), head), noise, temperature, keep, **rules)


def record_of(
    z: Tensor,  # (N, V)
    noise: Noise,
    temperature: float | Tensor = 1.0,
    keep: int = 10,
    **rules: Any,
) -> dict[str, Tensor]:
    """The same from whole rows of logits."""
    heat = torch.as_tensor(temperature, dtype=torch.float64).expand(z.shape[0])
    greedy = heat == 0
    x, kept = kept_mask(z, torch.where(greedy, 1.0, heat), rules)
    noisy = kept + noise.gumbel(slice(0, z.shape[1])).double()
    best = z.sort(dim=1, descending=True, stable=True)
    token = torch.where(greedy, best.indices[:, 0], noisy.argmax(1))
    logit = z.gather(1, token[:, None])
    zero = torch.zeros_like(heat)
    logp = z.log_softmax(1)
    return {
        "token": token,
        "token_logit": logit[:, 0],
        "rank": 1 + (z > logit).sum(1),
        "topk_logits": best.values[:, :keep],
        "topk_ids": best.indices[:, :keep],
        "logsumexp": z.logsumexp(1),
        "mean_logit": z.mean(1),
        "entropy": -(logp.exp() * logp.masked_fill(logp == -math.inf, 0.0)).sum(1),
        "temperature": heat,
        "logsumexp_at_temperature": torch.where(greedy, zero, x.logsumexp(1)),
        "log_kept_mass": torch.where(greedy, zero, kept.logsumexp(1) - x.logsumexp(1)),
        "n_kept": torch.where(greedy, 1, (kept > -math.inf).sum(1)),
    }


def compare(hidden: Tensor, head: ll.LMHead, noise: Noise, tolerance: float, *, memory_budget=None, **options) -> None:
    """Every field of sample_tokens' record equals the dense one."""
    expected = dense_record(hidden, head, noise, **options)
    record = ll.sample_tokens(hidden, head, noise=noise, memory_budget=memory_budget, **options)
    for name, want in expected.items():
        got = getattr(record, name)
        assert got.shape == want.shape, name
        if want.dtype == torch.int64:
            assert got.dtype == torch.int32, name
            assert torch.equal(got.long(), want), name
        else:
            torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: n + m)
