"""Heads and hidden states that end where memory does: a process that reads one number too many ends here."""

import ctypes
import mmap
import sys

import pytest
import torch

import logitless as ll
from logitless.vocab.backends.compiled import few
from tests.support.vocab.processors import multiply_by

PAGE, NO_ACCESS = mmap.PAGESIZE, 0
SIZES = [(33, 1, 5), (40, 31, 192), (70, 107, 776), (600, 129, 1001)]
FEW = [(1, 1, 1), (3, 31, 95), (32, 64, 97)]


def at_the_end(x: torch.Tensor) -> torch.Tensor:
    """The same numbers, whose last byte is the last one before a page that nobody may read."""
    nbytes = x.numel() * x.element_size()
    pages = -(-nbytes // PAGE)
    memory = mmap.mmap(-1, (pages + 1) * PAGE)
    begin = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    found = torch.frombuffer(memory, dtype=x.dtype, count=x.numel(), offset=pages * PAGE - nbytes).view_as(x)
    found.copy_(x)
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(begin + pages * PAGE), PAGE, NO_ACCESS) == 0
    return found


def main(kind: str) -> None:
    multiply_by(kind, pytest.MonkeyPatch())
    for n, h, v in SIZES:
        hidden, weight = (at_the_end(torch.randn(rows, h).bfloat16()).requires_grad_() for rows in (n, v))
        for head in (ll.LMHead(weight.detach()), ll.LMHead(weight)):  # frozen, and trained
            labels = torch.randint(v, (n,))
            ll.linear_cross_entropy(hidden, head, labels, backend="compiled").backward()
    few.WORTH, few.is_intel = 1, lambda: False
    for n, h, v in FEW:
        wide, wide_head = (at_the_end(torch.randn(rows, h)) for rows in (n, v))
        narrow, narrow_head = (at_the_end(x.bfloat16()) for x in (wide, wide_head))
        for hidden, weight in ((narrow, narrow_head), (wide, narrow_head), (wide, wide_head)):
            ll.token_stats(hidden, ll.LMHead(weight), want=("logsumexp",), backend="eager")
    print("nothing else was read")


if __name__ == "__main__":
    main(sys.argv[1])
