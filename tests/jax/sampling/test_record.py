"""The record of `logitless.jax`: room for tokens that are yet to come, some of them, and another shape."""

from itertools import islice

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="jax is not installed: pip install 'logitless[jax]'")

import jax.numpy as jnp  # noqa: E402

from logitless.errors import OptionError, ShapeError  # noqa: E402
from logitless.jax import SampleRecord  # noqa: E402
from logitless.jax.sampling.record import names  # noqa: E402


def numbered(shape: tuple[int, ...], keep: int) -> SampleRecord:
    """A record with another number in each place."""
    record = SampleRecord.empty(shape, keep=keep, vocab_size=9)
    return jax.tree.map(lambda x: jnp.arange(x.size, dtype=x.dtype).reshape(x.shape), record)


def test_nothing_is_written_yet():
    record = SampleRecord.empty((2, 3), keep=4, vocab_size=9)
    assert (record.token == -1).all()
    assert (record.topk_ids == -1).all()
    for name in set(names()) - {"token", "topk_ids"}:
        x = getattr(record, name)
        assert x.dtype == (jnp.int32 if name in ("rank", "n_kept") else jnp.float32), name
        assert x.shape == ((2, 3, 4) if name == "topk_logits" else (2, 3)), name
        assert not x.any(), name


@pytest.mark.parametrize("keep", [0, 9])
def test_as_many_entries_as_there_are(keep):
    assert SampleRecord.empty((2,), keep=keep, vocab_size=9).topk_ids.shape == (2, keep)


@pytest.mark.parametrize("keep", [-1, 10, True, 2.0])
def test_more_entries_than_there_are(keep):
    with pytest.raises(OptionError, match=r"keep: expected a whole number in 0\.\.9"):
        SampleRecord.empty((2,), keep=keep, vocab_size=9)


def test_one_step_is_written_and_read_and_the_others_stay():
    whole, part = SampleRecord.empty((2, 3), keep=4, vocab_size=9), numbered((2,), 4)
    written = whole.write((slice(None), 1), part)
    for name in names():
        found, want, before = (np.asarray(getattr(x, name)) for x in (written, part, whole))
        np.testing.assert_array_equal(found[:, 1], want, err_msg=name)
        np.testing.assert_array_equal(found[:, [0, 2]], before[:, [0, 2]], err_msg=name)
        np.testing.assert_array_equal(getattr(written[:, 1], name), want, err_msg=name)


def test_an_index_past_the_end_is_refused_so_that_an_iteration_ends():
    record = numbered((2, 3), 4)
    assert [tuple(row.token.tolist()) for row in islice(record, 9)] == [(0, 1, 2), (3, 4, 5)]
    for index in (2, -3, (0, 3), (slice(None), np.array([0, 3])), (..., 3)):
        with pytest.raises(IndexError, match="is out of bounds for axis"):
            record[index]
        with pytest.raises(IndexError, match="is out of bounds for axis"):
            record.write(index, numbered((), 4))
    assert jax.jit(lambda x, i: x[i])(record, 1).token.tolist() == [3, 4, 5]


def test_another_shape_of_the_tokens_leaves_their_entries_together():
    record = numbered((2, 3), 4)
    found = record.reshape(3, 2)
    for name in names():
        x = np.asarray(getattr(record, name))
        np.testing.assert_array_equal(getattr(found, name), x.reshape(3, 2, *x.shape[2:]), err_msg=name)


@pytest.mark.parametrize(
    "index", [..., (..., 1), (1, ...), (..., None), (0, ..., slice(1, 3)), (..., jnp.array([2, 0]))]
)
def test_dots_of_an_index_are_of_the_tokens_alone(index):
    record = numbered((2, 3), 4)
    part, best = record[index], [record.topk_ids[..., i][index] for i in range(4)]
    np.testing.assert_array_equal(part.token, record.token[index])
    np.testing.assert_array_equal(part.topk_ids, np.stack(best, -1))
    written = SampleRecord.empty((2, 3), keep=4, vocab_size=9).write(index, part)
    np.testing.assert_array_equal(written[index].topk_logits, part.topk_logits)
    np.testing.assert_array_equal(written.topk_ids[..., 0][index], best[0])


@pytest.mark.parametrize("keep", [0, 4])
def test_one_size_of_another_shape_may_be_left_out(keep):
    flat = numbered((2, 3), keep).reshape(-1)
    assert flat.shape == (6,)
    assert flat.topk_ids.shape == (6, keep)
    assert flat.reshape(3, -1).topk_logits.shape == (3, 2, keep)
    assert flat.reshape((3, 2)).topk_ids.shape == flat.reshape([3, -1]).topk_ids.shape == (3, 2, keep)
    assert flat[:0].reshape(-1, 5).topk_ids.shape == (0, 5, keep)


@pytest.mark.parametrize("sizes", [(), (4,), (-1, -1), (-1, 4), (-1, 2, 0), (3.0, 2), ((3,), 2), ("3", 2), (None,)])
def test_sizes_of_other_tokens(sizes):
    with pytest.raises(ShapeError, match=r"^record\.reshape: expected .*, got .+$"):
        numbered((2, 3), 4).reshape(*sizes)
    with pytest.raises(ShapeError, match=r"of 0 tokens, one of them -1 at most, got \(-1, 0\)"):
        numbered((0, 3), 4).reshape(-1, 0)


@pytest.mark.parametrize("shape", [4, None, "ab", (-1,), (2.0,), (True,), ((2,), 3)])
def test_no_shape(shape):
    with pytest.raises(ShapeError, match=r"^shape: expected whole numbers of at least 0 in a tuple, got .+$"):
        SampleRecord.empty(shape, keep=2, vocab_size=9)


@pytest.mark.parametrize("size", [0, True, 9.5, None])
def test_no_size_of_a_vocabulary(size):
    with pytest.raises(OptionError, match=f"vocab_size: expected a whole number of at least 1, got {size}"):
        SampleRecord.empty((2,), keep=0, vocab_size=size)
