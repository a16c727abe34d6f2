"""What stands for a draft's logits, without speculators: what cannot be of tokens is refused, however it is called."""

import pytest
import torch
import torch.nn.functional as F

import logitless as ll
from logitless.errors import ConfigError
from logitless.integrations.speculators import HeadInput


def test_an_operand_by_name_beside_another_or_in_a_list():
    head = ll.LMHead(torch.randn(7, 4))
    x = HeadInput.of(torch.randn(1, 3, 4), head, None)
    assert torch.equal(torch.argmax(input=x, dim=-1), torch.argmax(x.plain() @ head.weight.T, -1))
    rolled = torch.roll(input=x, shifts=1, dims=1)
    assert torch.equal(rolled.plain(), x.plain().roll(1, 1))
    for name, call in (
        ("linear", lambda: F.linear(input=x, weight=head.weight)),
        ("cat", lambda: torch.cat([x, x])),
        ("where", lambda: torch.where(torch.ones(1, 3, 1, dtype=torch.bool), x, 0.0)),
    ):
        with pytest.raises(ConfigError, match=f"its model asks {name} of logits, expected tokens' slices"):
            call()
