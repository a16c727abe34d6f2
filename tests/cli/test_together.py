"""What `logitless train` writes is what `logitless score` and `logitless sample` read."""

import json

import pyarrow.parquet as pq
import pytest

from logitless.cli.main import main


@pytest.mark.usefixtures("unmeasured")
def test_a_trained_checkpoint_is_sampled_and_scored(micro, tmp_path, capsys):
    """A greedy completion's log-probs are those that scoring its text gives."""
    place = tmp_path / "run"
    train = ["--model", micro.model, "--data", micro.data, "--context-length", 32, "--max-steps", 8, "--device", "cpu"]
    assert main([str(x) for x in ("train", *train, "--learning-rate", 1e-2, "--output-dir", place)]) == 0
    model, told = place / "model", tmp_path / "sampled.json"
    sample = ["--prompt", "file 3: aaa", "--temperature", 0, "--max-new-tokens", 16, "--device", "cpu", "--json", told]
    assert main([str(x) for x in ("sample", "--model", model, *sample)]) == 0
    (sequence,) = json.loads(told.read_text())["sequences"]
    text, scores, summary = tmp_path / "text.txt", tmp_path / "scores.parquet", tmp_path / "scored.json"
    text.write_bytes(("file 3: aaa" + sequence["text"]).encode())
    score = ["--data", text, "--bos", "no", "--keep", 2, "--device", "cpu", "--out", scores, "--json", summary]
    assert main([str(x) for x in ("score", "--model", model, *score)]) == 0
    rows = pq.read_table(scores).to_pylist()
    assert json.loads(summary.read_text())["tokens"] == len(rows)
    new = rows[sequence["prompt_tokens"] :]
    assert len(new) == len(sequence["tokens"]) == 16
    for row, token in zip(new, sequence["tokens"], strict=True):
        assert (row["token"], row["rank"]) == (token["id"], 1)
        assert row["logprob"] == pytest.approx(token["logprob"], abs=1e-4)
    assert "perplexity" in capsys.readouterr().out
