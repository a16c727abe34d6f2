"""Columns of a teacher's record on a few rows: what rounding may leave, which rows are in order, how many are not."""

import math
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch

from logitless.errors import DataError
from logitless.sample.columns import check_kinds, packed_hidden, read_best, read_hidden, read_places, unpacked_hidden

HERE = Path("t.parquet")


def best(off: float, mass: float) -> pa.Table:
    """One row with two entries of nine that have this probability together, but for rounding of its log."""
    logits = [math.log(mass / 2) + off] * 2
    return pa.table(
        {
            "logsumexp": pa.array([0.0], pa.float32()),
            "topk_ids": pa.array([[7, 3]], pa.list_(pa.int32())),
            "topk_logits": pa.array([logits], pa.list_(pa.float32())),
        }
    )


@pytest.mark.parametrize(("mass", "sign"), [(1.0, 1), (2 / 9, -1)])
def test_rounding_may_leave_a_tenth_of_the_log(mass, sign):
    found = read_best(best(sign * 0.09, mass), 2, 9, HERE)
    assert found["ids"].tolist() == [[7, 3]]
    assert found["ids"].dtype == torch.int64
    expected = "^t.parquet: expected best entries whose probabilities add up to 2/9..1, got 1 of 1 row otherwise: score"
    with pytest.raises(DataError, match=expected):
        read_best(best(sign * 0.11, mass), 2, 9, HERE)


def places(document: list[int], position: list[int], token: list[int]) -> pa.Table:
    kinds = {"document": pa.int64(), "position": pa.int32(), "token": pa.int32()}
    columns = {name: pa.array(x, kinds[name]) for name, x in zip(kinds, (document, position, token), strict=True)}
    return pa.table(columns | {"logsumexp": pa.array([None, *[1.0] * (len(token) - 1)], pa.float32())})


def test_documents_that_were_passed_over_leave_the_others_in_order():
    found = read_places(places([3, 5, 5, 9], [4, 0, 1, 0], [0, 8, 1, 2]), (3, 3), 9, HERE)
    assert [x.tolist() for x in found[:2]] == [[3, 5, 5, 9], [4, 0, 1, 0]]
    assert found[2].dtype == np.int64
    assert found[3].tolist() == [False, True, True, True]


@pytest.mark.parametrize(
    ("rows", "before", "wrong"),
    [
        (([3, 5, 5, 9], [4, 0, 1, 0], [0, 8, 1, 2]), (3, 4), 1),
        (([3, 5, 5, 9], [4, 1, 2, 0], [0, 8, 1, 2]), (3, 3), 1),
        (([3, 5, 5, 2], [4, 0, 3, 0], [0, 8, 1, 2]), (3, 3), 2),
    ],
)
def test_rows_out_of_order_are_counted(rows, before, wrong):
    with pytest.raises(DataError, match=f"documents in order, .* count up from 0, got {wrong} of 4 rows otherwise"):
        read_places(places(*rows), before, 9, HERE)


def test_columns_that_are_not_there_and_that_are_there_twice_are_named():
    schema = pa.schema([("token", pa.int32()), ("token", pa.string())])
    with pytest.raises(DataError, match=r"got no column document, position$"):
        check_kinds(schema, ["document", "token", "position"], 0, HERE)
    with pytest.raises(DataError, match=r"a column token of int32, got one of int32 and string: score again$"):
        check_kinds(schema, ["token"], 0, HERE)


def test_fp8_has_the_whole_range_beneath_a_tokens_largest_entry():
    hidden = torch.tensor([[-448.0, 2.0**-9, 3.0], [0.25, 0.0, -0.125]]) * 1024
    assert torch.equal(unpacked_hidden(packed_hidden(hidden, "fp8"), "fp8")[0], hidden[0])
    assert torch.allclose(unpacked_hidden(packed_hidden(hidden, "fp8"), "fp8")[1], hidden[1], rtol=1e-6)
    across = hidden.T.bfloat16()
    assert torch.equal(unpacked_hidden(packed_hidden(across, "bfloat16"), "bfloat16"), across)


def test_hidden_states_of_a_part_of_a_table_are_its_own_and_each_entry_is_a_number():
    states = torch.arange(12.0).bfloat16().reshape(3, 4)
    states[0, 3] = torch.nan
    rows = [row.view(torch.uint8).numpy().tobytes() for row in states]
    columns = {"logsumexp": pa.array([1.0] * 3, pa.float32()), "hidden": pa.array(rows, pa.binary(8))}
    found = read_hidden(pa.table(columns).slice(1), "bfloat16", HERE)
    assert torch.equal(unpacked_hidden(found, "bfloat16"), states[1:])
    with pytest.raises(DataError, match="expected hidden states that are finite, got 1 of 3 rows otherwise"):
        read_hidden(pa.table(columns), "bfloat16", HERE)
