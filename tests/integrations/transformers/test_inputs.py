"""What a model's inputs by name must be, whoever is given them."""

import numpy as np
import pytest
import torch

import logitless
from logitless.errors import DeviceError, DtypeError
from tests.support.integrations.tiny import TINY

IDS = [[5, 6, 7], [8, 9, 10]]
each_function = pytest.mark.parametrize(
    "call", [logitless.score, logitless.generate, logitless.hidden_states], ids=lambda call: call.__name__
)


@each_function
@pytest.mark.parametrize("made_by", [list, np.array, tuple])
@pytest.mark.parametrize("name", ["input_ids", "attention_mask"])
def test_what_a_tokenizer_returns_without_return_tensors(call, name, made_by):
    inputs = {"input_ids": torch.tensor(IDS), "attention_mask": torch.ones(2, 3).long(), name: made_by(IDS)}
    got = type(made_by(IDS)).__name__
    with pytest.raises(DtypeError, match=f"{name}: expected a tensor, got {got}; pass return_tensors='pt'"):
        call(TINY["llama"].build(), inputs)


@each_function
def test_inputs_without_names(call):
    with pytest.raises(DtypeError, match="expected a model's inputs by name in a dict, got Tensor"):
        call(TINY["llama"].build(), torch.tensor(IDS))


def test_a_mask_elsewhere():
    inputs = {"input_ids": torch.tensor(IDS), "attention_mask": torch.ones(2, 3, device="meta")}
    with pytest.raises(DeviceError, match="attention_mask is on meta, input_ids on cpu; move one of them"):
        logitless.score(TINY["llama"].build(), inputs)
