"""An fp16 head: gradients of logits stay fp32, and their products take no more digits than fp16 has.

A CPU has neither such products nor fp16 ones with fp32 results, so there a device is claimed and its products are
given the digits that a GPU would read.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
import triton
import triton.language as tl
from torch import Tensor

import logitless as ll
from bench.gpu.counts.claimed import claimed
from logitless.vocab.backends.triton import backend
from logitless.vocab.backends.triton.logits_grad_kernels import ten_digits

N, H, V = 37, 32, 1003


def cut(x: Tensor) -> Tensor:
    """What a TF32 product reads of an fp32 number: the digits behind the tenth are cut off."""
    return (x.view(torch.int32) & -0x2000).view(torch.float32)


@contextmanager
def products(device: str) -> Iterator[list[bool]]:
    """Whether each product of the gradient was one in TF32."""
    seen: list[bool] = []

    def read(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def called(a: Tensor, b: Tensor, out: Tensor) -> Tensor:
            seen.append(a.dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32")
            return function(cut(a), cut(b), out) if seen[-1] and device == "cpu" else function(a, b, out)

        return called

    with (
        patch.object(backend, "product", read(backend.product)),
        patch.object(backend, "add_product", read(backend.add_product)),
    ):
        if device == "cpu":
            with claimed(home="cpu"):
                yield seen
        else:
            yield seen


def gradients(lse_of: Callable[[Tensor, Tensor], Tensor], dtype: torch.dtype, device: str) -> list[Tensor]:
    """Of log-sum-exps under random cotangents: no label has a share of its own."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, H, generator=generator).half() for n in (N, V))
    upstream = torch.rand(N, generator=generator).to(device) / 4
    operands = [hidden.to(device, dtype).requires_grad_(), (weight / 4).to(device, dtype).requires_grad_()]
    lse = lse_of(*operands)
    return [x.double() for x in torch.autograd.grad((lse * upstream.to(lse.dtype)).sum(), operands)]


def dense(hidden: Tensor, weight: Tensor) -> Tensor:
    return (hidden @ weight.T).to(torch.promote_types(hidden.dtype, torch.float32)).logsumexp(-1)


def streamed(hidden: Tensor, weight: Tensor) -> Tensor:
    return ll.token_stats(hidden, ll.LMHead(weight), want=("logsumexp",), backend="triton").logsumexp


def test_gradients_are_nearer_to_float64_than_fp16_torchs(device):
    before = torch.backends.cuda.matmul.fp32_precision
    exact, plain = gradients(dense, torch.float64, device), gradients(dense, torch.float16, device)
    with products(device) as seen:
        found = gradients(streamed, torch.float16, device)
    for mine, theirs, right in zip(found, plain, exact, strict=True):
        assert (mine - right).norm() <= (theirs - right).norm()
        assert abs((mine * right).sum() / (right * right).sum() - 1) < 5e-5  # cut off, not rounded: 3e-4
    assert seen.count(True) == 2
    assert torch.backends.cuda.matmul.fp32_precision == before


@triton.jit
def _round(x, BLOCK: tl.constexpr):
    at = x + tl.arange(0, BLOCK)
    tl.store(at, ten_digits(tl.load(at)))


def test_numbers_are_rounded_to_ten_digits(device):
    """A GPU's own NaN has every digit set: rounded as other numbers are, it would be zero."""
    bits = [0x7FFFFFFF, 0x3F800FFF, 0x3F801000, -0x407FF000]  # NaN, 1 and just below half a digit, half of one, -that
    x = torch.tensor(bits, dtype=torch.int32, device=device).view(torch.float32)
    _round[(1,)](x, BLOCK=4)
    assert x[0].isnan()
    assert x[1:].view(torch.int32).tolist() == [0x3F800000, 0x3F802000, -0x407FE000]


def test_nan_goes_through(device):
    with products(device):
        hidden = torch.ones(3, H, dtype=torch.float16, device=device)
        hidden[1] = torch.nan
        hidden.requires_grad_()
        streamed(hidden, torch.ones(V, H, dtype=torch.float16, device=device)).sum().backward()
    assert hidden.grad is not None
    assert hidden.grad.isnan().all(1).tolist() == [False, True, False]
