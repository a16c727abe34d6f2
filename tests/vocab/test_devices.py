"""What the pass sets on a device while it lasts, and leaves as it was."""

import pytest
import torch

from logitless.vocab.devices import tf32_products
from tests.support.switches import put_back


@pytest.fixture
def matmul():
    with put_back():
        yield torch.backends.cuda.matmul


@pytest.mark.parametrize("before", ["none", "ieee"])
def test_both_names_of_the_switch_can_be_read_while_it_lasts(before, matmul):
    matmul.fp32_precision = before
    with tf32_products(True):
        assert matmul.fp32_precision == "tf32"
        assert matmul.allow_tf32
        assert torch.get_float32_matmul_precision() == "high"
    assert matmul.fp32_precision == before
    assert not matmul.allow_tf32
    assert torch.get_float32_matmul_precision() == "highest"


@pytest.mark.parametrize("asked", ["high", "medium"])
def test_a_caller_who_asked_for_it_keeps_it(asked, matmul):
    torch.set_float32_matmul_precision(asked)
    with tf32_products(True):
        assert matmul.allow_tf32
        assert torch.get_float32_matmul_precision() == asked
    assert torch.get_float32_matmul_precision() == asked
