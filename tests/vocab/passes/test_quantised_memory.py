"""A quantised head keeps the bytes of its blocks: no path makes its rows whole, forward or backward."""

import pytest
import torch

import logitless as ll
from tests.support.allocations import trace_allocations
from tests.support.vocab.measuring import not_interpreted
from tests.support.vocab.quantised import KINDS, Stored, stored_blocks

N, H, V = 16, 256, 8192
BUDGET = 1 << 20
PER_TOKEN = 4 * N * 16 * H  # a few (N, H) buffers, some of rows at labels, and the per-token numbers


def whole(ops: Stored) -> int:
    """Bytes of the dequantised weight."""
    return 4 * ops.weight.shape.numel()


def test_bytes_of_each_format():
    """Of Q8_0 about half of what bf16 takes and a quarter of fp32's, of the others less."""
    for kind in KINDS:
        ops = stored_blocks(kind, 64)
        share = ops.weight.nbytes / whole(ops)
        assert share == pytest.approx({"Q8_0": 0.266, "Q6_K": 0.205, "Q4_K": 0.141}.get(kind, share), abs=1e-3)
        assert share <= 0.266
        assert ops.head.weight.parts[0].data_ptr() == ops.weight.parts[0].data_ptr()
        assert ll.explain(ops.hidden, ops.head, ops.labels).head_bytes == ops.weight.nbytes


@pytest.mark.halved
@not_interpreted
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K"])
@pytest.mark.parametrize("training", [("hidden",), ("hidden", "a", "b"), ()], ids=str)
@pytest.mark.parametrize("what", ["statistics", "cross-entropy", "loss"])
def test_nothing_of_the_weight_is_made_whole(what, training, kind, backend):
    ops = stored_blocks(kind, V, (N,), h=H, bias=False, ranks=(2,), training=training)
    options = {"memory_budget": BUDGET, "backend": backend}

    def step():
        if what == "cross-entropy":
            out = [ll.linear_cross_entropy(ops.hidden, ops.head, ops.labels, **options)]
        elif what == "loss":
            given = {"want": ("logprob", "entropy"), **options}
            out = [ll.token_loss(lambda s: s.logprob - s.entropy, ops.hidden, ops.head, ops.labels, **given)]
        else:
            want = ("logprob", "entropy", "sum_sq_prob", "max_logit")
            stats = ll.token_stats(ops.hidden, ops.head, ops.labels, want=want, top_k=8, **options)
            out = [getattr(stats, name) for name in want]
        if ops.leaves:
            torch.autograd.grad(out, list(ops.leaves.values()), [torch.rand_like(x) for x in out])

    step()
    traced = trace_allocations(step)
    gradients = sum(x.numel() * 4 for x in ops.leaves.values())
    allowed = BUDGET + gradients + PER_TOKEN
    assert traced.largest <= BUDGET < whole(ops) // 7
    assert traced.peak <= allowed < whole(ops) // 4, f"{traced.peak / 2**20:.2f} of {allowed / 2**20:.2f} MiB"


def test_nor_for_tokens():
    ops = stored_blocks("Q8_0", V, (N,), h=H, bias=False, training=())
    traced = trace_allocations(lambda: ll.sample_tokens(ops.hidden, ops.head, memory_budget=BUDGET))
    assert traced.largest <= BUDGET
    assert traced.peak <= BUDGET + N * (1 << 15) < whole(ops) // 4  # the best entries and their noise


def test_explain_says_how_it_is_held():
    ops = stored_blocks("Q8_0", V, (N,))
    said = ll.explain(ops.hidden, ops.head, ops.labels)
    assert (said.head_bytes, said.quantised) == (V * 96 * 34 // 32, "Q8_0")
    assert "a head of 0.8 MiB in Q8_0, dequantised slice by slice" in str(said)
    plain = ll.explain(ops.hidden, ll.LMHead(ops.truth), ops.labels)
    assert (plain.head_bytes, plain.quantised) == (4 * V * 96, None)
    assert "dequantised" not in str(plain)
