"""`SampleRecord`: numbers computed from it against the whole row, and how others read it."""

import json
import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pyarrow.parquet
import pytest
import torch

import logitless as ll
from logitless.errors import DtypeError, OptionError, ShapeError
from logitless.sample import Noise, SampleRecord

V, H = 60, 8
NOISE = Noise(torch.arange(6).view(2, 3), torch.zeros(2, 3, dtype=torch.long))


@pytest.fixture
def drawn():
    hidden, head = torch.randn(2, 3, H, dtype=torch.float64), ll.LMHead(torch.randn(V, H, dtype=torch.float64))
    return hidden @ head.weight.T, ll.sample_tokens(hidden, head, temperature=0.5, top_p=0.9, keep=4, noise=NOISE)


def test_what_is_computed_from_it(drawn):
    z, record = drawn
    logp, ids = z.log_softmax(-1), record.token.long()[..., None]
    near = {"rtol": 1e-10, "atol": 1e-10}
    torch.testing.assert_close(record.logprob, logp.gather(-1, ids)[..., 0], **near)
    torch.testing.assert_close(record.topk_logprob, logp.topk(4).values, **near)
    torch.testing.assert_close(record.self_certainty, -logp.mean(-1) - math.log(V), **near)
    torch.testing.assert_close(record.tail_mass, 1 - logp.topk(4).values.exp().sum(-1), **near)
    torch.testing.assert_close(record.perplexity, torch.exp(-record.logprob.mean(-1)), **near)
    zeros = replace(record, token=torch.zeros_like(record.token))  # an id as any other
    assert torch.equal(zeros.perplexity, record.perplexity)
    kept = z.sort(-1, descending=True).values[0, 0, : int(record.n_kept[0, 0])] / 0.5
    behaviour = record.token_logit[0, 0] / 0.5 - kept.logsumexp(0)
    torch.testing.assert_close(record.behaviour_logprob[0, 0], behaviour, **near)
    for i, x in record.alternatives(0, 1):
        assert i != record.token[0, 1]
        assert x == pytest.approx(float(logp[0, 1, i]))


def test_self_certainty_of_nearly_equal_logits_is_not_negative():
    record = ll.sample_tokens(torch.randn(64, 32), ll.LMHead(1e-4 * torch.randn(2_000, 32)), keep=1)
    assert (record.self_certainty >= 0).all()


@pytest.mark.parametrize("heat", [1.0, 0.1, 1e-3])
@pytest.mark.parametrize("top_k", [1, 3])
def test_behaviour_is_never_above_certain(heat, top_k):
    record = ll.sample_tokens(torch.randn(99, H), ll.LMHead(torch.randn(V, H)), temperature=heat, top_k=top_k)
    x = record.topk_logits.double()[:, :top_k] / heat
    expected = record.token_logit.double() / heat - x.logsumexp(-1)
    assert (record.behaviour_logprob <= 0).all()
    assert ((record.behaviour_logprob - expected).abs() <= 2e-7 * x[:, 0].abs() + 1e-6).all()


def test_bytes_of_a_token():
    record = SampleRecord.empty((5, 7), keep=20, vocab_size=V)
    tensors = [x for x in vars(record).values() if isinstance(x, torch.Tensor)]
    assert sum(x.nbytes for x in tensors) == 35 * 200


def test_writing_steps_into_a_preallocated_record():
    hidden, head = torch.randn(2, 3, H), ll.LMHead(torch.randn(V, H))
    whole = SampleRecord.empty((2, 4), keep=4, vocab_size=V)
    assert (whole.topk_ids == -1).all()
    assert whole.perplexity.tolist() == [1, 1]
    for t in range(3):
        noise = Noise(NOISE.seeds[:, t], NOISE.positions[:, t])
        whole.write((slice(None), t), ll.sample_tokens(hidden[:, t], head, keep=4, noise=noise))
    at_once = ll.sample_tokens(hidden, head, keep=4, noise=NOISE)
    assert torch.equal(whole.token[:, :3], at_once.token)
    assert (whole.token[:, 3] == -1).all()
    torch.testing.assert_close(whole.perplexity, at_once.perplexity)
    assert whole.to_arrow().num_rows == 6


@pytest.mark.parametrize(
    "index", [..., (..., 1), (1, ...), (..., None), (0, ..., slice(1, 3)), (..., torch.tensor([2, 0]))]
)
def test_dots_of_an_index_are_of_the_tokens_alone(drawn, index):
    _, record = drawn
    part, best = record[index], [record.topk_ids[..., i][index] for i in range(4)]
    assert torch.equal(part.token, record.token[index])
    assert torch.equal(part.topk_ids, torch.stack(best, -1))
    written = SampleRecord.empty((2, 3), keep=4, vocab_size=V, dtype=torch.float64)
    written.write(index, part)
    assert torch.equal(written[index].topk_logits, part.topk_logits)
    assert torch.equal(written.topk_ids[..., 0][index], best[0])


@pytest.mark.parametrize("keep", [0, 4])
def test_one_size_of_another_shape_may_be_left_out(keep):
    flat = SampleRecord.empty((2, 3), keep=keep, vocab_size=V).reshape(-1)
    assert flat.shape == (6,)
    assert flat.topk_ids.shape == (6, keep)
    assert flat.reshape(3, -1).topk_logits.shape == (3, 2, keep)
    assert flat.reshape((3, 2)).topk_ids.shape == flat.reshape(torch.Size([3, -1])).topk_ids.shape == (3, 2, keep)
    assert flat[:0].reshape(-1, 5).topk_ids.shape == (0, 5, keep)


@pytest.mark.parametrize("sizes", [(), (4,), (-1, -1), (-1, 4), (-1, 2, 0), (3.0, 2), ((3,), 2), ("3", 2), (None,)])
def test_sizes_of_other_tokens(sizes):
    with pytest.raises(ShapeError, match=r"^record\.reshape: expected .*, got .+$"):
        SampleRecord.empty((2, 3), keep=4, vocab_size=V).reshape(*sizes)
    with pytest.raises(ShapeError, match=r"of 0 tokens, one of them -1 at most, got \(-1, 0\)"):
        SampleRecord.empty((0, 3), keep=4, vocab_size=V).reshape(-1, 0)


def test_a_record_of_no_shape_or_vocabulary():
    for shape in (4, None, (-1,), (2.0,)):
        with pytest.raises(ShapeError, match=r"^shape: expected whole numbers of at least 0 in a tuple, got .+$"):
            SampleRecord.empty(shape, keep=2, vocab_size=V)  # pyright: ignore[reportArgumentType]
    for size in (0, 9.5):
        with pytest.raises(OptionError, match=f"^vocab_size: expected a whole number of at least 1, got {size}$"):
            SampleRecord.empty((2,), keep=0, vocab_size=size)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(("other", "message"), [({"keep": 3}, "keep=4, .* got 3"), ({"vocab_size": 9}, "got 9")])
def test_writing_a_part_of_another_record(other, message):
    options = {"keep": 4, "vocab_size": V}
    with pytest.raises(OptionError, match=message):
        SampleRecord.empty((2, 4), **options).write(0, SampleRecord.empty((4,), **options | other))


def test_rows_that_a_processor_changed_stay_known_as_such():
    empty, changed = SampleRecord.empty((2, 3), keep=4, vocab_size=V), SampleRecord.empty((2,), keep=4, vocab_size=V)
    changed = replace(changed, processed=True)
    with pytest.raises(OptionError, match="no logits processor changed"):
        empty.write((slice(None), 0), changed)
    whole = replace(empty, processed=True)
    whole.write((slice(None), 0), changed)
    assert whole.to_arrow().schema.metadata[b"processed"] == b"true"
    with pytest.raises(OptionError, match="no logits processor changed"):
        whole.sampling_mask()


def test_arrow_and_parquet(drawn, tmp_path):
    _, record = drawn
    pyarrow.parquet.write_table(record.to_arrow(), tmp_path / "record.parquet")
    table = pyarrow.parquet.read_table(tmp_path / "record.parquet")
    assert table.schema.metadata == {b"vocab_size": b"60", b"processed": b"false"}
    assert table["sequence"].to_pylist() == [0, 0, 0, 1, 1, 1]
    assert table["position"].to_pylist() == [0, 1, 2, 0, 1, 2]
    assert table["token"].to_pylist() == record.token.flatten().tolist()
    assert table["topk_ids"].to_pylist() == record.topk_ids.flatten(0, 1).tolist()
    assert table["topk_logits"].to_pylist() == record.topk_logits.flatten(0, 1).tolist()


def test_dict_is_json(drawn):
    _, record = drawn
    back = json.loads(json.dumps(record.to_dict()))
    assert back["topk_ids"] == record.topk_ids.tolist()
    assert back["vocab_size"] == V


def test_as_openai_and_vllm_have_it(drawn):
    _, record = drawn
    one = record[1]
    for t, entry in enumerate(one.top_logprobs(lambda i: f"é{i}")):
        assert entry["token"] == f"é{int(one.token[t])}"
        assert bytes(entry["bytes"]).decode() == entry["token"]
        assert entry["logprob"] == pytest.approx(float(one.logprob[t]))
        assert [x["token"] for x in entry["top_logprobs"]] == [f"é{i}" for i in one.topk_ids[t].tolist()]
    for t, row in enumerate(one.vllm_logprobs(str)):
        first, *others = row.items()
        assert first[0] == one.token[t]
        assert first[1]["rank"] == one.rank[t]
        assert all(x["rank"] == one.topk_ids[t].tolist().index(i) + 1 for i, x in others)
        assert len(row) in (4, 5)
    with pytest.raises(ShapeError, match=r"record\[b\]"):
        record.top_logprobs(str)


def test_a_record_without_best_entries(drawn):
    hidden, head = torch.randn(3, H), ll.LMHead(torch.randn(V, H))
    record = ll.sample_tokens(hidden, head, keep=0)
    assert record.topk_ids.shape == (3, 0)
    torch.testing.assert_close(record.tail_mass, torch.ones(3))
    assert "topk_ids" not in record.to_arrow().column_names
    assert len(record.vllm_logprobs()[0]) == 1


def test_a_record_of_all_entries_has_no_tail():
    record = ll.sample_tokens(torch.randn(300, H), ll.LMHead(torch.randn(V, H)), keep=V)
    assert not record.tail_mass.any()


def test_a_small_tail_has_its_digits_and_rounding_leaves_none_below_0():
    record = ll.sample_tokens(torch.randn(2, H), ll.LMHead(torch.randn(V, H)), keep=2)
    logits, logsumexp = torch.tensor([[0.0, -99.0], [1.0, 0.0]]), torch.tensor([1e-9, 1.31326])  # exactly 1.3132617
    found = replace(record, topk_logits=logits, logsumexp=logsumexp).tail_mass
    torch.testing.assert_close(found, torch.tensor([1e-9, 0.0]), rtol=1e-6, atol=0.0)
    assert not found.signbit().any()  # -0.0 in JSON


@pytest.mark.parametrize(
    ("options", "error", "fragment"),
    [
        ({"keep": V + 1}, OptionError, "0..60"),
        ({"keep": -1}, OptionError, "keep"),
        ({"keep": 1.5}, OptionError, "keep"),
        ({"keep": True}, OptionError, "keep: expected a whole number in 0..60 (the vocabulary), got True"),
        ({"top_p": 0.0}, OptionError, "0 < p ≤ 1"),
        ({"top_p": 1.1}, OptionError, "top_p"),
        ({"top_p": math.nan}, OptionError, "top_p"),
        ({"min_p": -0.1}, OptionError, "min_p"),
        ({"min_p": 1.1}, OptionError, "min_p"),
        ({"top_k": -1}, OptionError, "top_k"),
        ({"top_k": 1.5}, OptionError, "top_k: expected a whole number, 0 for all entries, got 1.5"),
        ({"top_k": True}, OptionError, "top_k"),
        ({"order": "min_p"}, OptionError, "order: expected 'transformers' or 'vllm', got 'min_p'"),
        ({"temperature": -1.0}, OptionError, "greedy"),
        ({"temperature": math.inf}, OptionError, "greedy"),
        ({"temperature": torch.tensor([1.0, -1.0, 1.0])}, OptionError, "greedy"),
        ({"temperature": torch.ones(4)}, ShapeError, "broadcasts"),
        ({"noise": NOISE, "generator": torch.Generator()}, OptionError, "both"),
        ({"noise": Noise(torch.ones(3), torch.ones(3))}, DtypeError, "integer"),
        ({"noise": 3}, OptionError, "Noise"),
        ({"generator": 3}, OptionError, "torch.Generator or None, got 3"),
        ({"temperature": "1"}, OptionError, "greedy"),
        ({"memory_budget": 0}, OptionError, "memory_budget"),
    ],
)
def test_bad_input(options, error, fragment):
    with pytest.raises(error) as caught:
        ll.sample_tokens(torch.randn(3, H), ll.LMHead(torch.randn(V, H)), **options)
    assert fragment in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("noise", [NOISE, None])
def test_numbers_of_other_kinds(noise):
    hidden, head = torch.randn(2, 3, H), ll.LMHead(torch.randn(V, H))
    plain, others = (
        ll.sample_tokens(hidden, head, noise=noise, generator=None if noise else torch.Generator(), **options)
        for options in (
            {"top_k": 5, "top_p": 0.9, "min_p": 0.125, "keep": 4},
            {"top_k": np.int64(5), "top_p": Fraction(9, 10), "min_p": np.float16(0.125), "keep": np.int32(4)},
        )
    )
    assert torch.equal(plain.token, others.token)
    assert torch.equal(plain.n_kept, others.n_kept)
    assert others.topk_ids.shape == (2, 3, 4)


def test_not_a_head():
    with pytest.raises(DtypeError, match="LMHead"):
        ll.sample_tokens(torch.randn(3, H), torch.randn(V, H))


RULES = ({"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.2}, {"top_k": 9, "top_p": 0.8, "min_p": 0.05}, {"temperature": 0})


@pytest.mark.parametrize("rules", RULES, ids=str)
def test_a_ratio_over_the_sampled_sets_is_one(rules):
    """The record's own log-probs, read again over its sampling mask: on-policy samples have a ratio of 1."""
    rules = {"temperature": 0.7, **rules}
    hidden, head = torch.randn(40, H, dtype=torch.float64), ll.LMHead(torch.randn(V, H, dtype=torch.float64))
    record = ll.sample_tokens(hidden, head, keep=V, **rules)
    mask = record.sampling_mask()
    assert mask.counts.tolist() == record.n_kept.tolist()
    over = ll.token_stats(
        hidden, head, record.token.long(), sampling_mask=mask, temperature=rules["temperature"] or 1.0
    )
    torch.testing.assert_close(
        (over.logprob - record.behaviour_logprob).exp(), torch.ones(40).double(), rtol=0, atol=1e-9
    )
    whole = ll.token_stats(hidden, head, record.token.long(), temperature=rules["temperature"] or 1.0)
    assert ((whole.logprob - record.behaviour_logprob).exp() < 1 - 1e-3).any()  # what a full row takes for off-policy


def test_sets_that_were_cut_say_so():
    hidden, head = torch.randn(2, 20, H), ll.LMHead(torch.randn(V, H) / 9)
    record = ll.sample_tokens(hidden, head, top_p=0.5, keep=10)
    assert record.cut.any()
    with pytest.raises(OptionError, match=f"at most keep=10 entries, got {int(record.cut.sum())} tokens with more"):
        record.sampling_mask()
    mask = record.sampling_mask(cut="empty")
    assert (mask.counts == torch.where(record.cut, 0, record.n_kept).flatten()).all()
    labels = record.token.long().masked_fill(record.cut, -100)
    assert ll.token_stats(hidden, head, labels, sampling_mask=mask).logprob.shape == (2, 20)
    with pytest.raises(OptionError, match="'refuse' or 'empty'"):
        record.sampling_mask(cut="drop")


def test_one_set_that_was_cut_beside_a_whole_one():
    record = ll.sample_tokens(torch.randn(2, H), ll.LMHead(torch.randn(V, H)), top_k=3, keep=4)
    first = torch.zeros_like(record.token)  # id 0 is a token as any other
    record = replace(record, token=first, n_kept=torch.tensor([4, 5], dtype=torch.int32))
    assert record.cut.tolist() == [False, True]
    with pytest.raises(OptionError, match="got 1 tokens with more, up to 5"):
        record.sampling_mask()
    assert record.sampling_mask(cut="empty").counts.tolist() == [4, 0]


def test_tokens_that_were_never_written_have_no_set():
    record = SampleRecord.empty((2, 3), keep=4, vocab_size=V)
    hidden, head = torch.randn(2, H), ll.LMHead(torch.randn(V, H))
    record.write((slice(None), 0), ll.sample_tokens(hidden, head, top_k=3, keep=4))
    assert record.sampling_mask().counts.tolist() == [3, 0, 0, 3, 0, 0]


def test_a_single_token_has_its_set():
    hidden, head = torch.randn(3, H), ll.LMHead(torch.randn(V, H))
    record = ll.sample_tokens(hidden, head, top_k=3, keep=4)
    mask = record[1].sampling_mask()
    assert mask.counts.tolist() == [3]
    assert torch.equal(mask.token_ids, record.topk_ids[1, :3].long())
    over = ll.token_stats(hidden[1], head, record.token[1].long(), sampling_mask=mask).logprob
    torch.testing.assert_close(over, record.behaviour_logprob[1])
