"""Prompts as a batch; what a generation_config.json says: saved again, refused, and no part of what is learned from."""

import pytest
import torch
from transformers import GenerationConfig

from logitless.errors import ConfigError
from logitless.workbench.sources.generation import align_tokens, check_generation, from_all_entries, left_padded
from logitless.workbench.sources.tokenizer import pretrained
from tests.support.workbench.micro import micro_directory, micro_model


def test_prompts_end_at_one_place():
    ids, mask = left_padded([[5, 6, 7], [8], []], 2, torch.device("cpu"))
    assert ids.tolist() == [[5, 6, 7], [2, 2, 8], [2, 2, 2]]
    assert mask.tolist() == [[1, 1, 1], [0, 0, 1], [0, 0, 0]]
    assert mask.dtype == ids.dtype == torch.long


def test_a_temperature_without_do_sample_is_saved_again(tmp_path):
    """As published models have it, and transformers refuses to write."""
    micro_directory(tmp_path)
    tokenizer, model = pretrained(str(tmp_path)), micro_model()
    model.generation_config.update(temperature=0.9, top_p=0.6)
    align_tokens(model, tokenizer)
    model.save_pretrained(tmp_path / "again")
    assert '"temperature": 0.9' in (tmp_path / "again" / "generation_config.json").read_text()
    model.generation_config.early_stopping = "soon"
    with pytest.raises(ConfigError, match=r"generation_config\.json: expected what transformers can save"):
        align_tokens(model, tokenizer)


@pytest.mark.parametrize(
    "said",
    [
        {"eos_token_id": "x"},
        {"eos_token_id": [1, "x"]},
        {"bad_words_ids": 3},
        {"sequence_bias": {}},
        {"exponential_decay_length_penalty": 3},
        {"do_sample": True, "top_p": "x"},
        {"repetition_penalty": 0},
        {"stop_strings": 3},
    ],
    ids=str,
)
def test_values_that_generate_cannot_begin_with(said, tmp_path):
    micro_directory(tmp_path)
    model, tokenizer = micro_model(), pretrained(str(tmp_path)).saved
    check_generation(model, tokenizer, "here")
    model.generation_config = GenerationConfig.from_dict(said)
    with pytest.raises(ConfigError, match=r"^--model here: generation_config\.json: .") as caught:
        check_generation(model, tokenizer, "here")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "said",
    [{"prompt_lookup_num_tokens": 3}, {"dola_layers": "high"}, {"force_words_ids": [[3]]}, {"use_mtp": True}],
    ids=str,
)
def test_other_ways_to_generate_are_taken_out_of_the_file(said, tmp_path):
    """Whoever samples on the command line has no model.generate to go to."""
    micro_directory(tmp_path)
    model, tokenizer = micro_model(), pretrained(str(tmp_path)).saved
    model.generation_config.update(**said)
    with pytest.raises(ConfigError, match=rf"^--model here: .*json: {next(iter(said))} asks for .*; take it out"):
        check_generation(model, tokenizer, "here")


def test_a_policy_samples_from_all_entries():
    """Whatever its file says: a nucleus of one entry, and a word that may not follow another."""
    model, ids = micro_model(), torch.tensor([[1, 2, 3]]).expand(64, -1)
    model.generation_config.update(top_k=1, eos_token_id=2, pad_token_id=0, suppress_tokens=list(range(200)))
    before, given = model.generation_config.to_dict(), {"do_sample": True, "max_new_tokens": 8}
    assert len(model.generate(ids, **given).unique(dim=0)) == 1
    with from_all_entries(model):
        found = model.generate(ids, **given)
        assert (model.generation_config.eos_token_id, model.generation_config.pad_token_id) == (2, 0)
    assert len(found.unique(dim=0)) == 64
    assert (found[:, 3:] < 200).any()
    assert model.generation_config.to_dict() == before
