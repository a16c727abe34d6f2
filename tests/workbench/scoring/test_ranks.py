"""Two ranks share the work and give what one gives."""

import pytest

from logitless.workbench.scoring import block, documents
from logitless.workbench.scoring.run import run
from tests.support.integrations.launching import torchrun
from tests.workbench.scoring.conftest import config, corpus


@pytest.mark.slow
def test_two_ranks_give_what_one_gives(micro, tmp_path):
    data = corpus(tmp_path / "a.jsonl", 40)
    torchrun("tests.workbench.scoring.test_ranks", str(micro), str(data), str(tmp_path / "two.parquet"))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.jsonl", "two.parquet"]
    small = documents.PIECE, block.PIECE
    try:
        documents.PIECE = block.PIECE = 400
        summary = run(config(micro, data, tmp_path / "one.parquet"))
    finally:
        documents.PIECE, block.PIECE = small
    assert summary["ranks"] == 1
    assert (tmp_path / "two.parquet").read_bytes() == (tmp_path / "one.parquet").read_bytes()


if __name__ == "__main__":
    import sys
    from pathlib import Path

    documents.PIECE = block.PIECE = 400
    model, data, out = map(Path, sys.argv[1:])
    summary = run(config(model, data, out))
    assert not summary or (summary["ranks"] == 2 and summary["tokens_scored_now"] == summary["scored_tokens"])
