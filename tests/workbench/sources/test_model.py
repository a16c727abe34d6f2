"""Checkpoints that are not what their configuration says: refused, since what they lack would be random."""

from pathlib import Path

import pytest
from transformers import BertConfig, BertForMaskedLM, BertModel

from logitless.errors import ConfigError
from logitless.workbench.sources.model import load_model, resolve_trained
from tests.support.workbench.micro import micro_model

BERT = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 64}


def load(place: Path) -> object:
    return load_model(resolve_trained(str(place), "score with"))


@pytest.mark.parametrize("tied", [True, False])
def test_a_whole_checkpoint_is_loaded(tmp_path, tied):
    model = micro_model(tie_word_embeddings=tied)
    model.save_pretrained(tmp_path)
    again = load(tmp_path).state_dict()
    assert all((again[name] == x).all() for name, x in model.state_dict().items())


@pytest.mark.parametrize("name", list(micro_model(tie_word_embeddings=False).state_dict()))
def test_a_checkpoint_that_lacks_any_one_tensor(tmp_path, name):
    model = micro_model(tie_word_embeddings=False)
    model.save_pretrained(tmp_path, state_dict={k: x for k, x in model.state_dict().items() if k != name})
    with pytest.raises(ConfigError, match=rf"--model {tmp_path}: its weights lack {name}, which its config.json asks"):
        load(tmp_path)


def test_many_tensors_are_named_and_counted(tmp_path):
    BertModel(BertConfig(**BERT)).save_pretrained(tmp_path)
    micro_model().config.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"its weights lack lm_head.weight, .* and \d\d more, which its config"):
        load(tmp_path)


def test_a_model_that_sees_what_follows(tmp_path):
    """All its weights are there, and its loss would be that of a model which reads the answer."""
    BertForMaskedLM(BertConfig(**BERT)).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="expected a causal language model, got BertForMaskedLM, which sees what fol"):
        load(tmp_path)
