"""Two ranks share the work and give what one gives."""

import pyarrow.parquet as pq
import pytest

from logitless.workbench.scoring import block, documents
from logitless.workbench.scoring.run import run
from tests.support.integrations.launching import leave, torchrun
from tests.workbench.scoring.conftest import config, corpus


@pytest.mark.slow
@pytest.mark.parametrize("store", ["topk", "hidden"])
def test_two_ranks_give_what_one_gives(micro, tmp_path, store):
    data = corpus(tmp_path / "a.jsonl", 40)
    torchrun("tests.workbench.scoring.test_ranks", str(micro), str(data), str(tmp_path / "two.parquet"), store)
    head = ["two.head.safetensors"] if store == "hidden" else []
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.jsonl", *head, "two.parquet"]
    small = documents.PIECE, block.PIECE
    try:
        documents.PIECE = block.PIECE = 400
        summary = run(config(micro, data, tmp_path / "one.parquet", store=store))
    finally:
        documents.PIECE, block.PIECE = small
    assert summary["ranks"] == 1
    one, two = (tmp_path / f"{name}.parquet" for name in ("one", "two"))
    if store == "topk":
        assert two.read_bytes() == one.read_bytes()
    else:  # the records name their heads' files
        assert pq.read_table(two).equals(pq.read_table(one))
        heads = [path.with_suffix(".head.safetensors").read_bytes() for path in (one, two)]
        assert heads[0] == heads[1]


if __name__ == "__main__":
    import sys
    from pathlib import Path

    documents.PIECE = block.PIECE = 400
    model, data, out = map(Path, sys.argv[1:4])
    summary = run(config(model, data, out, store=sys.argv[4]))
    assert not summary or (summary["ranks"] == 2 and summary["tokens_scored_now"] == summary["scored_tokens"])
    leave()
