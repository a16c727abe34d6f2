"""The tokens of a run, as they are read back."""

from logitless.workbench.sft import data
from logitless.workbench.sft.data import load, prepare
from logitless.workbench.sources.model import load_tokenizer, resolve


def test_some_tokens_are_held_out_and_one_row_at_least(micro, tmp_path, monkeypatch):
    source = resolve(micro.config.model)
    prepare(micro.config, load_tokenizer(source), source.vocab_size, tmp_path / "tokens.npz")
    assert data.HELD_OUT_TOKENS == 8192
    found = []
    for tokens in (64, 63, 3):
        monkeypatch.setattr(data, "HELD_OUT_TOKENS", tokens)
        found.append(len(load(tmp_path / "tokens.npz", 16)[1]))
    assert found == [4, 3, 1]
