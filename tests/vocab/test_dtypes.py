"""Tensors of integers, and what is none."""

import pytest
import torch

import logitless as ll
from logitless.errors import DtypeError
from logitless.vocab.dtypes import of_integers


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, torch.int64])
def test_integers_of_any_width_are_integers(dtype):
    assert of_integers(torch.ones(2, dtype=dtype))


@pytest.mark.parametrize("x", [torch.ones(2), torch.ones(2) > 0, torch.ones(2) * 1j, [1, 2], None])
def test_fractions_masks_and_lists_are_not(x):
    assert not of_integers(x)


def test_no_ignore_index_wraps_around_in_narrow_labels():
    """-100 is 156 in a byte."""
    assert ll.count_tokens(torch.tensor([155, 156, 157], dtype=torch.uint8)) == 3


def test_a_mask_of_tokens_is_not_counted_as_labels():
    with pytest.raises(DtypeError, match=r"expected integer ids, got torch\.bool"):
        ll.count_tokens(torch.tensor([True, False]))
