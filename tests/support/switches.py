"""Torch's switches of a whole process, which decide how it multiplies: to be read, and to be put back."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

ONEDNN: Any = torch.backends.mkldnn  # whose types lack these
PRECISIONS: list[Any] = [torch.backends.cuda.matmul, ONEDNN.matmul, ONEDNN.conv, ONEDNN.rnn]


def switches() -> dict[str, Any]:
    """The switches' positions."""
    return {
        "threads": torch.get_num_threads(),
        "dtype": torch.get_default_dtype(),
        "device": torch.get_default_device(),
        "grad": torch.is_grad_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "onednn": ONEDNN.enabled,
        "fp32_precision": [products.fp32_precision for products in PRECISIONS],
    }


@contextmanager
def put_back() -> Iterator[None]:
    """The threads, and the precisions of fp32 products, are afterwards what they were."""
    threads, asked = torch.get_num_threads(), torch.get_float32_matmul_precision()
    before = [products.fp32_precision for products in PRECISIONS]
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.set_float32_matmul_precision(asked)
        for products, precision in zip(PRECISIONS, before, strict=True):
            products.fp32_precision = precision
