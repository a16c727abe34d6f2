"""Matrices split over two and four ranks: one launch, a test for each case; and what is refused."""

import pytest
from torch import nn
from transformers import AutoConfig

from logitless.errors import LogitlessError
from logitless.models.tensor_parallel import check_split, split_matrices
from tests.support.models.tensor_ranks import CASES, SIZES, model
from tests.support.vocab.sharding import assert_ok, launch


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return launch("tests.support.models.tensor_ranks", tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("size", [4, 2])
@pytest.mark.parametrize("case", CASES)
def test_split_over_ranks(found, case, size):
    assert_ok(found, case, size)


@pytest.mark.parametrize(
    ("kind", "more", "ranks", "message"),
    [
        ("qwen3", {}, 3, "must divide the model's num_attention_heads, which is 8; use one of 1, 2, 4"),
        ("qwen3", {}, 8, "must divide the model's num_key_value_heads, which is 4; use one of 1, 2, 4"),
        ("qwen3", {"intermediate_size": 26}, 4, "must divide the model's intermediate_size, which is 26; use one of"),
        ("gemma3n_text", {"intermediate_size": [24, 26]}, 4, "intermediate_size, which is 26; use one of 1, 2$"),
        ("qwen3", {"vocab_size": 15}, 4, "needs a vocabulary of 16 or more, got 15"),
        ("phi3", {}, 2, "phi3 splits by colwise_gather_output; use --sharding fsdp2"),
        ("gpt2", {}, 2, "gpt2 has none; use --sharding fsdp2"),
    ],
)
def test_models_that_cannot_be_split(kind, more, ranks, message):
    with pytest.raises(LogitlessError, match=message) as raised:
        check_split(AutoConfig.for_model(kind, **(SIZES | more)), ranks)
    assert str(raised.value).startswith(f"--tensor-parallel {ranks}")


def test_sparse_attention_is_not_split():
    with pytest.raises(LogitlessError, match="cannot split --attention nsa"):
        check_split(AutoConfig.for_model("qwen3", **SIZES), 2, sparse=True)


def test_a_head_of_another_kind_is_refused_and_the_model_left_alone():
    """Whatever such a layer does beside its product, ranks would not do."""

    class Scaled(nn.Linear):
        pass

    one = model()
    one.lm_head = Scaled(16, 61, bias=False)
    with pytest.raises(LogitlessError, match="got Embedding and Scaled"):
        split_matrices(one, None)
    assert type(one.get_input_embeddings()) is nn.Embedding
