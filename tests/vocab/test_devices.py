"""What the pass sets on a device while it lasts, and leaves as it was."""

from pathlib import Path
from typing import Any

import pytest
import torch

from logitless.vocab import devices
from logitless.vocab.backends import logits
from logitless.vocab.backends.logits import exp_, exp_into
from logitless.vocab.devices import bf16_products, exp_is_fast, tf32_products
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


@pytest.mark.parametrize(("before", "while_it_lasts"), [("none", "bf16"), ("ieee", "ieee"), ("bf16", "bf16")])
def test_bf16_products_are_put_back_even_after_an_error(before, while_it_lasts):
    with put_back():
        onednn: Any = torch.backends.mkldnn
        onednn.matmul.fp32_precision = before
        seen = []

        def stop():
            with bf16_products(True):
                seen.append(onednn.matmul.fp32_precision)
                raise ValueError("inside")

        with pytest.raises(ValueError, match="inside"):
            stop()
        assert seen == [while_it_lasts]
        assert onednn.matmul.fp32_precision == before
        with bf16_products(False):
            assert onednn.matmul.fp32_precision == before


@pytest.mark.parametrize(
    ("named", "fast"), [("vendor_id\t: GenuineIntel\n", True), ("vendor_id\t: AuthenticAMD\n", False)]
)
def test_an_intel_processor_has_a_fast_exp(named, fast, monkeypatch):
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: named)
    devices.is_intel.cache_clear()
    try:
        assert exp_is_fast(torch.zeros(1)) == (fast and torch.backends.mkl.is_available())
        assert not exp_is_fast(torch.zeros(1, device="meta"))
    finally:
        devices.is_intel.cache_clear()


@pytest.mark.parametrize("fast", [True, False])
def test_both_ways_of_exp_are_float64s(fast, monkeypatch):
    monkeypatch.setattr(logits, "exp_is_fast", lambda _: fast)
    x = torch.cat([torch.linspace(-80, 20, 1001), torch.tensor([-1e30, -torch.inf, torch.nan])])
    right = x.double().exp()
    into = torch.empty_like(x)
    assert exp_into(x, into) is into
    torch.testing.assert_close(into.double(), right, rtol=4e-6, atol=1e-38, equal_nan=True)
    assert torch.equal(exp_(x.clone()).nan_to_num(-1), into.nan_to_num(-1))


def test_threads_that_overlap_leave_the_switch_as_it_was():
    with put_back():
        onednn: Any = torch.backends.mkldnn
        onednn.matmul.fp32_precision = "none"
        first, second = bf16_products(True), bf16_products(True)
        first.__enter__()
        second.__enter__()
        first.__exit__(None, None, None)
        second.__exit__(None, None, None)
        assert onednn.matmul.fp32_precision == "none"


@pytest.mark.parametrize(
    ("known", "allowed", "capable"), [(True, True, True), (False, True, True), (True, False, True), (True, True, False)]
)
def test_tiles_need_the_processor_and_the_system(known, allowed, capable, monkeypatch):
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: known, raising=False)
    monkeypatch.setattr(torch.cpu, "_init_amx", lambda: allowed, raising=False)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"amx_bf16": capable}, raising=False)
    devices._multiplies_tiles.cache_clear()
    try:
        found = devices.has_bf16_tiles("cpu")
        assert found == (known and allowed and capable and torch.backends.mkldnn.is_available())
        assert not devices.has_bf16_tiles("meta")
    finally:
        devices._multiplies_tiles.cache_clear()
