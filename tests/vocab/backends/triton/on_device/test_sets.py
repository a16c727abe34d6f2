"""Statistics over sampling masks: a kernel's program for each entry reads its token's row, and nothing is gathered."""

import torch

from logitless.sample import SamplingMask
from logitless.vocab.backends import rows as plain
from logitless.vocab.backends.triton import rows
from tests.support.plain import over
from tests.support.vocab.comparing import operands
from tests.support.vocab.triton_calls import check

N, H, V = 7, 40, 301


def mask_around(labels: torch.Tensor) -> SamplingMask:
    """One to 30 entries of each token, in any order, its label among them."""
    return SamplingMask.of(
        [[(label + 7 * j) % V for j in range(1 + 5 * i % 30)] for i, label in enumerate(labels.tolist())]
    )


@over("want", {"log-prob": ("logprob",), "more": ("logprob", "entropy", "self_certainty", "max_logit", "sum_sq_prob")})
@over("form", {"plain": {"bias": False}, "bias and softcap": {"softcap": 5.0}, "lora": {"ranks": (2,), "bias": False}})
def test_statistics_and_gradients(want, form, device):
    ops = operands((N,), H, V, **form)
    check(device, ops, want, sampling_mask=mask_around(ops.labels).to(device), temperature=torch.rand(N) + 0.5)


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
