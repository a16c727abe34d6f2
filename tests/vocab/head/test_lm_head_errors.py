"""What a head refuses, and weights that are not all there."""

from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

import logitless as ll
from logitless.errors import ConfigError, DeviceError, DtypeError, OptionError, ShapeError
from logitless.vocab.head.from_model import transforms_of
from tests.support.vocab.refusing import BIAS, NAN, WEIGHT, H, V, refused

HEADS = {
    "weight of one dimension": (ShapeError, {"weight": WEIGHT[0]}, ("(vocab, hidden)", "got (4,)")),
    "weight of three dimensions": (ShapeError, {"weight": WEIGHT[None]}, ("(vocab, hidden)", "got (1, 9, 4)")),
    "weight that is a module": (ShapeError, {"weight": nn.Linear(H, V)}, ("(vocab, hidden)", "got Linear")),
    "weight of no rows": (ShapeError, {"weight": WEIGHT[:0]}, ("weight has no rows",)),
    "weight of integers": (DtypeError, {"weight": WEIGHT.to(torch.int8)}, ("floating point", "got torch.int8")),
    "short bias": (ShapeError, {"bias": BIAS[1:]}, ("bias must have shape (9,)", "got (8,)")),
    "bias of two dimensions": (ShapeError, {"bias": BIAS[None]}, ("bias must have shape (9,)", "got (1, 9)")),
    "bias elsewhere": (DeviceError, {"bias": BIAS.to("meta")}, ("bias is on meta", "weight on cpu")),
    "bias of integers": (DtypeError, {"bias": BIAS.long()}, ("bias", "floating point", "got torch.int64")),
    "bias that is no tensor": (DtypeError, {"bias": True}, ("bias", "got bool")),
    "no vocabulary": (OptionError, {"vocab_size": 0}, ("vocab_size must be in 1..9", "got 0")),
    "a flag": (OptionError, {"vocab_size": True}, ("vocab_size must be in 1..9", "got True")),
    "a fraction": (OptionError, {"vocab_size": 4.0}, ("vocab_size must be in 1..9", "got 4.0")),
    "more than the rows": (OptionError, {"vocab_size": 10}, ("vocab_size must be in 1..9", "got 10")),
    "half an entry": (OptionError, {"vocab_size": 4.5}, ("vocab_size", "got 4.5")),
    "softcap of zero": (OptionError, {"softcap": 0.0}, ("softcap must be positive or None", "got 0.0")),
    "negative softcap": (OptionError, {"softcap": -30.0}, ("softcap must be positive or None", "got -30.0")),
    "softcap of NaN": (OptionError, {"softcap": NAN}, ("softcap must be positive or None", "got nan")),
    "scale of NaN": (OptionError, {"scale": NAN}, ("scale", "got nan")),
    "scale of None": (OptionError, {"scale": None}, ("scale", "got None")),
}


@pytest.mark.parametrize("name", HEADS)
def test_heads_that_cannot_be(name):
    error, arguments, fragments = HEADS[name]
    refused(error, lambda: ll.LMHead(**{"weight": WEIGHT, **arguments}), "LMHead: ", *fragments)


class DTensor(Tensor):
    """Known by its name: vocab imports no torch.distributed."""


class Int4Tensor(Tensor):
    """What quantisers put behind a floating dtype."""

    def __tensor_flatten__(self):
        return [], None


@pytest.mark.parametrize(
    ("kind", "fragments"),
    [(DTensor, ("sharded", "head module's own forward")), (Int4Tensor, ("a Int4Tensor", "dequantise it first"))],
)
def test_weights_that_are_not_all_there(kind, fragments):
    weight, bias = WEIGHT.as_subclass(kind), BIAS.as_subclass(kind)
    refused(ConfigError, lambda: ll.LMHead(weight), "LMHead: weight is ", *fragments)
    refused(ConfigError, lambda: ll.LMHead(WEIGHT, bias), "LMHead: bias is ", *fragments)
    linear = nn.Linear(H, V)
    linear.weight = nn.Parameter(weight)
    refused(ConfigError, lambda: ll.LMHead.of(linear), *fragments)


def test_a_weight_that_zero3_keeps_elsewhere():
    weight = torch.empty(0)
    weight.ds_numel = V * H
    refused(ConfigError, lambda: ll.LMHead(weight), "LMHead: weight is sharded", "ZeRO-3", "logitless.install")


def test_hooks_that_may_change_the_logits():
    for register, kind in (("register_forward_hook", "hook"), ("register_forward_pre_hook", "pre-hook")):
        linear = nn.Linear(H, V)
        handle = getattr(linear, register)(partial(lambda *_: None))
        refused(ConfigError, lambda x=linear: ll.LMHead.of(x), f"a forward {kind} of {__name__}, which may change")
        handle.remove()
        ll.LMHead.of(linear)
    linear = prune.l1_unstructured(nn.Linear(H, V), "weight", 0.3)  # whose hook makes the weight that is read
    assert torch.equal(ll.LMHead.of(linear).weight, linear.weight)


def test_whole_numbers_of_any_kind():
    for size in (4, np.int64(4), torch.tensor(4)):
        head = ll.LMHead(WEIGHT, vocab_size=size)
        assert type(head.vocab_size) is int
        assert head.rows == 4


@pytest.mark.parametrize("name", ["final_logit_softcapping", "logit_scale"])
def test_a_configuration_whose_transforms_are_no_numbers(name):
    config = SimpleNamespace(**{"model_type": "x", name: "30,0"})
    refused(ConfigError, lambda: transforms_of(config, "X"), f"config.json: {name}: expected a number, got '30,0'")
