"""Prices and slices: the table of the design, and budgets that hold."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from logitless.algebra.costs import (
    ALIGNED,
    FUSED_WIDTH,
    MIB,
    Price,
    aligned,
    copied,
    dense_loss_bytes,
    fused_slices_of,
    gemm_flop,
    gpu_budget,
    logits_bytes,
    price_of,
    slices_of,
    waves,
)

GIB = 1 << 30
NONE = {"hidden_grad": False, "weight_grad": False, "bias_grad": False}
FROZEN = {**NONE, "hidden_grad": True}
TRAINED = {"hidden_grad": True, "weight_grad": True, "bias_grad": False}


@pytest.mark.parametrize(
    ("want", "grads", "loss", "method", "gemms"),
    [
        (("logprob", "entropy"), NONE, False, "values", 1),
        (("kl",), NONE, False, "values", 2),
        (("logprob", "logsumexp", "self_certainty"), FROZEN, False, "basis", 2),
        (("entropy",), FROZEN, False, "basis", 3),
        (("kl",), FROZEN, False, "basis", 4),
        (("entropy", "sum_sq_prob"), FROZEN, False, "recompute", 3),
        (("logprob", "entropy"), TRAINED, False, "recompute", 4),
        (("logprob", "kl"), TRAINED, False, "recompute", 6),
        (("logprob", "entropy", "kl"), TRAINED, True, "in-forward", 4),
        (("logprob",), TRAINED, True, "in-forward", 3),
        (("logprob", "entropy"), FROZEN, True, "in-forward", 2),
        (("rank",), TRAINED, False, "values", 1),
        (("label_logit", "max_logit", "mean_logit"), TRAINED, False, "one-hot", 1),
    ],
)
def test_prices(want, grads, loss, method, gemms):
    price = price_of(want, loss=loss, **grads)
    assert (price.method, price.gemms) == (method, gemms)


def test_bases_that_cancel_are_recomputed_where_they_would_be_rounded():
    assert price_of(("reverse_kl",), half_products=False, **FROZEN) == Price("basis", 4, ("p", "q"))
    assert price_of(("reverse_kl",), half_products=True, **FROZEN) == Price("recompute", 5)
    assert price_of(("kl",), half_products=True, **FROZEN).method == "basis"


def test_softcapped_mean_logit_is_recomputed():
    assert price_of(("mean_logit",), softcap=False, **FROZEN).method == "one-hot"
    assert price_of(("mean_logit",), softcap=True, **FROZEN).method == "recompute"


@given(
    n=st.integers(0, 300_000),
    v=st.integers(1, 300_000),
    budget=st.integers(1, 1 << 30),
    device=st.sampled_from(["cpu", "cuda"]),
    heads=st.integers(1, 2),
    tiles=st.integers(3, 16),
    converted=st.integers(0, 8192),
    each=st.integers(0, 20_000),
    whole=st.booleans(),
)
def test_slices_keep_to_the_budget(n, v, budget, device, heads, tiles, converted, each, whole):
    sizes = {"heads": heads, "tiles": tiles, "converted": converted, "each": each}
    got = slices_of(n, v, budget=budget, device=device, whole=whole, **sizes)
    assert 1 <= got.tokens <= max(n, 1)
    assert 1 <= got.width <= v
    least = 4 * (heads * v + (tiles + converted) * got.width) if whole else 4 * (64 * tiles + converted)  # one row
    assert got.nbytes <= max(budget, least + each + 4)


def test_the_figures_that_the_project_starts_from():
    tokens, vocab = 131_072, 151_936
    assert logits_bytes(tokens, vocab, 2) / GIB == pytest.approx(37.09, abs=0.01)
    assert dense_loss_bytes(tokens, vocab, 2) / GIB == pytest.approx(37.09 * 5, abs=0.05)
    assert gemm_flop(4096, 4096, 128_256) == 2 * 4096 * 4096 * 128_256
    assert slices_of(tokens, vocab, budget=256 * MIB, device="cpu").nbytes <= 256 * MIB


@pytest.mark.parametrize(
    ("vocab", "budget", "heads", "tokens"),
    [
        (32_768, 256 * MIB, 1, 1024),  # as many as are any faster
        (65_536, 256 * MIB, 1, 512),  # half of the budget
        (32_768, 256 * MIB, 2, 512),  # of both heads
        (131_072, 256 * MIB, 1, 256),
        (200_000, 256 * MIB, 1, 256),  # more than half: as few are slower
        (131_072, GIB, 1, 1024),
        (262_144, 256 * MIB, 1, 240),  # all of it: 9 chunks, in whole vectors
    ],
)
def test_a_cpu_keeps_whole_rows_in_half_of_the_budget(vocab, budget, heads, tokens):
    assert slices_of(2048, vocab, budget=budget, heads=heads, device="cpu", whole=True).tokens == tokens


@pytest.mark.parametrize(
    ("n", "budget", "tokens"),
    [
        (2048, 256 * MIB, 240),  # 9 chunks, of 228 if even
        (2048, 230 * MIB, 208),  # 10 chunks, of 205
        (2048, 235 * MIB, 228),  # where 240 do not fit
        (235, 256 * MIB, 235),  # nor are there as many
        (100, 14 * MIB, 13),  # less than a vector
    ],
)
def test_a_cpus_chunks_are_whole_vectors_within_the_budget(n, budget, tokens):
    found = slices_of(n, 262_144, budget=budget, device="cpu", whole=True)
    assert found.tokens == tokens
    assert found.nbytes <= budget


@pytest.mark.parametrize(
    ("n", "width"), [(128, 8192), (130, 8065), (136, 7680), (300, 3495), (304, 3424), (512, 2048), (513, 2044)]
)
def test_logits_that_are_read_in_columns_have_whole_blocks(n, width):
    assert slices_of(n, 32_768, budget=256 * MIB, device="cpu").width == width
    assert slices_of(n, 1031, budget=256 * MIB, device="cpu").width == 1031  # nor is a whole vocabulary cut for it


@pytest.mark.parametrize("n", [1, 8, 300])
@pytest.mark.parametrize("budget", [1 << 16, 1 << 22, 1 << 28])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_wide_slices_keep_the_tokens_and_the_budget(n, budget, device):
    options = {"budget": budget, "device": device, "tiles": 4, "converted": 64, "whole": True}
    narrow, wide = slices_of(n, 50_000, **options), slices_of(n, 50_000, **options, wide=True)
    assert wide.tokens == narrow.tokens
    assert wide.width >= narrow.width
    assert wide.nbytes <= max(budget, narrow.nbytes)
    if n == 8 and budget == 1 << 28:
        assert wide.width == 50_000


@given(
    n=st.integers(1, 10**6),
    v=st.integers(1, 10**6),
    budget=st.integers(1, 10**10),
    heads=st.integers(1, 2),
    bases=st.integers(0, 2),
    converted=st.integers(0, 10**4),
    whole=st.booleans(),
    streamed=st.sampled_from([0, 32 * MIB]),
    processors=st.sampled_from([0, 132]),
)
def test_slices_of_kernels_keep_to_the_budget(n, v, budget, heads, bases, converted, whole, streamed, processors):
    sizes = {"heads": heads, "bases": bases, "converted": converted, "whole": whole, "streamed": streamed}
    s = fused_slices_of(n, v, budget=budget, **sizes, processors=processors, hidden=4096)
    assert 1 <= s.tokens <= n
    assert 1 <= s.width <= v
    tiles = heads + max(0, bases - 1)
    row = -(-v // s.width) * aligned(s.width)  # of slices that all stay, each with room for the widest
    least = tiles * row if whole else tiles * (64 + ALIGNED)
    assert s.nbytes <= max(budget, 4 * (least + converted * s.width + tiles * s.tokens * ALIGNED))
    if bases and not whole:
        assert s.width <= FUSED_WIDTH


@given(
    n=st.integers(1, 10**6),
    v=st.integers(1, 10**6),
    budget=st.integers(1, 10**10),
    beside=st.sampled_from([2, 4]),
    processors=st.sampled_from([0, 132]),
)
def test_slices_with_their_weights_beside_them_keep_to_the_budget(n, v, budget, beside, processors):
    s = fused_slices_of(n, v, budget=budget, bases=1, beside=beside, processors=processors)
    assert 1 <= s.tokens <= n
    assert 1 <= s.width <= v
    assert s.nbytes <= max(budget, (4 + beside) * (64 + s.tokens * ALIGNED + ALIGNED))


def test_slices_of_kernels_at_the_sizes_of_a_real_head():
    assert fused_slices_of(4096, 128_256, budget=1024 * MIB, whole=True).tokens == 2048
    qwen = fused_slices_of(8192, 151_936, budget=1024 * MIB, whole=True)
    assert (qwen.tokens, qwen.width) == (13 * 128, 151_936)  # five chunks, in whole blocks of a product
    assert fused_slices_of(4096, 128_256, budget=256 * MIB).width == 16_384
    assert fused_slices_of(4096, 128_256, budget=256 * MIB, bases=1).width == FUSED_WIDTH
    assert fused_slices_of(4096, 128_256, budget=256 * MIB, bases=1, beside=2).width == 10_912
    assert fused_slices_of(4096, 128_256, budget=256 * MIB, streamed=32 * MIB).width == 2048


def test_sizes_on_a_gpu_fill_its_processors():
    h200 = {"processors": 132, "hidden": 4096}
    assert fused_slices_of(4096, 128_256, budget=1024 * MIB, whole=True, **h200).tokens == 2048
    qwen = fused_slices_of(8192, 151_936, budget=1024 * MIB, whole=True, **h200)
    assert qwen.tokens == 1024  # 128 blocks of a product with the head, where 1,664 tokens make 208: two waves
    assert waves(1024, 4096, 132) == 1
    assert waves(1664, 4096, 132) == 2
    narrow = fused_slices_of(131_072, 151_936, budget=1024 * MIB, whole=True, processors=132, hidden=2560)
    assert narrow.tokens == 1664
    streamed = fused_slices_of(4096, 128_256, budget=1024 * MIB, **h200)
    assert streamed.width % 256 == 0
    assert 2 * streamed.width >= 128_256
    assert fused_slices_of(64, 151_936, budget=256 * MIB, whole=True, **h200).tokens == 64
    assert fused_slices_of(0, 151_936, budget=256 * MIB, whole=True, **h200).tokens == 1  # as everywhere: a step
    basis = fused_slices_of(4096, 128_256, budget=256 * MIB, bases=1, beside=2, **h200)
    assert basis.width == 37 * 256  # 1,184 blocks of a product: 8.97 waves


def test_the_default_budget_of_a_gpu_is_a_share_of_its_memory():
    assert [gpu_budget(gib * GIB) // MIB for gib in (8, 24, 80, 141)] == [256, 384, 1024, 1024]


def test_a_heads_copy_leaves_room_for_slices():
    assert copied(300, 200) == 200
    assert copied(300, 201) == 0
