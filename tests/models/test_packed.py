"""Attention of packed documents in blocks of queries, against dense masks in float64."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoConfig, AutoModelForCausalLM, CTRLConfig, GPT2Config, OPTConfig

from logitless.models import packed
from logitless.models.packed import keeps_apart, packed_attention
from tests.support.allocations import largest_allocation
from tests.support.workbench.micro import SHAPE

SMALL = {
    "gpt2": GPT2Config(vocab_size=99, n_embd=32, n_layer=2, n_head=2, n_positions=64),
    "ctrl": CTRLConfig(vocab_size=99, n_embd=32, n_layer=2, n_head=2, dff=32),
    "opt": OPTConfig(vocab_size=99, hidden_size=32, ffn_dim=32, num_hidden_layers=2, num_attention_heads=2),
    **{kind: AutoConfig.for_model(kind, **SHAPE) for kind in ("qwen3", "gemma3_text", "bloom")},
}


def dense(query, key, value, positions, scaling, window=None):
    keys, length = key.shape[2], query.shape[2]
    sees = torch.zeros(query.shape[0], length, keys, dtype=torch.bool)
    for row, places in enumerate(positions.expand(query.shape[0], -1).tolist()):
        for i, place in enumerate(places):
            last = keys - length + i
            first = max(0, last - place)
            sees[row, i, first if window is None else max(first, last - window + 1) : last + 1] = True
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
    return scaled_dot_product_attention(query, key, value, attn_mask=sees[:, None], scale=scaling)


def places(*rows, keep):
    """The last `keep` positions of documents of these lengths, end to end."""
    return torch.stack([torch.cat([torch.arange(n) for n in row])[-keep:] for row in rows])


def problem(batch, heads, kv_heads, queries, keys, dtype=torch.float64):
    shapes = (batch, heads, queries, 6), (batch, kv_heads, keys, 6), (batch, kv_heads, keys, 6)
    return [torch.randn(shape, dtype=dtype).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("mask_bytes", [1, 3000, 1 << 20])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (3, 1)])
@pytest.mark.parametrize("window", [None, 1, 9])
@pytest.mark.parametrize(
    ("rows", "queries"),
    [([[23], [23]], 23), ([[5, 17, 1], [1, 1, 21]], 23), ([[5, 17, 1], [12, 11]], 7), ([[40]], 1), ([[7, 3]], 10)],
)
def test_values_and_gradients_equal_the_definition(rows, queries, window, heads, kv_heads, mask_bytes, monkeypatch):
    monkeypatch.setattr(packed, "MASK_BYTES", mask_bytes)
    tensors = problem(len(rows), heads, kv_heads, queries, sum(rows[0]))
    positions = places(*rows, keep=queries)
    ours = packed_attention(*tensors, positions, 0.7, window)
    theirs = dense(*tensors, positions, 0.7, window)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    upstream = torch.randn_like(ours)
    for a, b in zip(*(torch.autograd.grad(x, tensors, upstream) for x in (ours, theirs)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


def test_a_document_may_have_begun_before_the_first_key():
    tensors, positions = problem(1, 2, 1, 9, 9), torch.arange(5, 14)[None]
    ours, theirs = (attention(*tensors, positions, 0.7) for attention in (packed_attention, dense))
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_one_row_of_positions_serves_a_batch():
    tensors, positions = problem(3, 2, 1, 9, 9), places([4, 5], keep=9)
    each = packed_attention(*tensors, positions.expand(3, -1), 0.5)
    torch.testing.assert_close(packed_attention(*tensors, positions, 0.5), each)


def test_gradients_in_bfloat16_are_summed_in_more(monkeypatch):
    """A sum over many blocks in bfloat16 would be off by far more than one rounding."""
    monkeypatch.setattr(packed, "MASK_BYTES", 1)
    rounded = problem(1, 2, 1, 300, 300, torch.bfloat16)
    exact = [t.detach().double().requires_grad_() for t in rounded]
    upstream, positions = torch.randn(1, 2, 300, 6).bfloat16(), places([300], keep=300)
    found = torch.autograd.grad(packed_attention(*rounded, positions), rounded, upstream)
    wanted = torch.autograd.grad(packed_attention(*exact, positions), exact, upstream.double())
    for a, b in zip(found, wanted, strict=True):
        assert (a.double() - b).norm() < 4e-3 * b.norm()


@pytest.mark.parametrize(("batch", "keys"), [(1, 2048), (4, 1024)])
def test_memory_is_linear_in_the_context(batch, keys, monkeypatch):
    """And the budget is a whole batch's."""
    monkeypatch.setattr(packed, "MASK_BYTES", 1 << 18)
    tensors = problem(batch, 2, 1, keys, keys, torch.float32)

    def step(attention):
        attention(*tensors, places([900, keys - 900], keep=keys), 1.0).sum().backward()

    assert largest_allocation(lambda: step(packed_attention)) <= 1 << 18
    assert largest_allocation(lambda: step(dense)) >= keys * keys


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", SMALL)
def test_models_that_keep_documents_apart(kind, dtype):
    """As the second document's logits say, alone and behind another one."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(SMALL[kind], dtype=dtype).train()
    ids, positions = torch.randint(90, (1, 9)), torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
    found = keeps_apart(model)
    assert model.training
    assert all(x.grad is None for x in model.parameters())
    model.eval().float()
    both, alone = (model(input_ids=ids[:, i:], position_ids=positions[:, i:], use_cache=False).logits for i in (0, 4))
    assert found == torch.allclose(both[:, 4:], alone, atol=1e-5)
    assert found == (kind not in ("opt", "bloom"))


def test_weights_that_are_no_numbers_are_not_said_to_mix_documents():
    model = AutoModelForCausalLM.from_config(SMALL["qwen3"])
    torch.nn.init.constant_(model.model.norm.weight, float("nan"))
    assert keeps_apart(model)
