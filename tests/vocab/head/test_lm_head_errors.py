"""What a head refuses, and weights that are not all there."""

from fractions import Fraction
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
    "weight that is a module": (
        ShapeError,
        {"weight": nn.Linear(H, V)},
        ("(vocab, hidden)", "got Linear; use LMHead.of(module)"),
    ),
    "weight of no rows": (ShapeError, {"weight": WEIGHT[:0]}, ("weight has no rows",)),
    "weight of integers": (DtypeError, {"weight": WEIGHT.to(torch.int8)}, ("floating point", "got torch.int8")),
    "short bias": (ShapeError, {"bias": BIAS[1:]}, ("bias must have shape (9,)", "got (8,)")),
    "bias of two dimensions": (ShapeError, {"bias": BIAS[None]}, ("bias must have shape (9,)", "got (1, 9)")),
    "bias elsewhere": (DeviceError, {"bias": BIAS.to("meta")}, ("bias is on meta", "weight on cpu")),
    "bias of integers": (DtypeError, {"bias": BIAS.long()}, ("bias", "floating point", "got torch.int64")),
    "bias that is no tensor": (DtypeError, {"bias": True}, ("bias", "got bool")),
    "no vocabulary": (OptionError, {"vocab_size": 0}, ("vocab_size: expected a whole number in 1..9", "got 0")),
    "a flag": (OptionError, {"vocab_size": True}, ("vocab_size: expected a whole number in 1..9", "got True")),
    "a fraction": (OptionError, {"vocab_size": 4.0}, ("vocab_size: expected a whole number in 1..9", "got 4.0")),
    "more than the rows": (OptionError, {"vocab_size": 10}, ("vocab_size: expected a whole number in 1..9", "got 10")),
    "half an entry": (OptionError, {"vocab_size": 4.5}, ("vocab_size", "got 4.5")),
    "softcap of zero": (OptionError, {"softcap": 0.0}, ("softcap must be positive or None", "got 0.0")),
    "negative softcap": (OptionError, {"softcap": -30.0}, ("softcap must be positive or None", "got -30.0")),
    "softcap of NaN": (OptionError, {"softcap": NAN}, ("softcap must be positive or None", "got nan")),
    "softcap beyond floats": (OptionError, {"softcap": 10**400}, ("softcap must be positive or None", "got 1000")),
    "softcap beyond float32": (OptionError, {"softcap": 1e39}, ("softcap must be positive or None", "got 1e+39")),
    "scale beyond float32": (
        OptionError,
        {"scale": -1e39},
        ("scale must be a finite number, in float32", "got -1e+39"),
    ),
    "scale of NaN": (OptionError, {"scale": NAN}, ("scale", "got nan")),
    "scale beyond floats": (OptionError, {"scale": -(10**400)}, ("scale must be a finite number", "got -1000")),
    "shard that is none": (OptionError, {"shard": 2}, ("shard must be a VocabShard or None", "got int")),
    "adapters that are a tensor": (DtypeError, {"adapters": WEIGHT}, ("adapters must be a tuple", "got Tensor")),
    "adapters in a list": (DtypeError, {"adapters": [None]}, ("adapters must be a tuple", "got list")),
    "adapters that are none": (
        DtypeError,
        {"adapters": (None,)},
        ("adapters must be a tuple", "got something else in it"),
    ),
    "scale of None": (OptionError, {"scale": None}, ("scale", "got None")),
}


@pytest.mark.parametrize("name", HEADS)
def test_heads_that_cannot_be(name):
    error, arguments, fragments = HEADS[name]
    refused(error, lambda: ll.LMHead(**{"weight": WEIGHT, **arguments}), "LMHead: ", *fragments)


class DTensor(Tensor):
    """Known by its name and placements: vocab imports no torch.distributed."""

    placements, device_mesh = (), SimpleNamespace(ndim=2)


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


@pytest.mark.parametrize("kind", ["sparse_coo", "_mkldnn"])
def test_weights_that_are_not_dense(kind):
    weight = WEIGHT.to_mkldnn() if kind == "_mkldnn" else WEIGHT.to_sparse(layout=getattr(torch, kind))
    refused(ConfigError, lambda: ll.LMHead(weight), f"LMHead: weight is {kind}, expected a dense tensor", "to_dense()")


def test_a_weight_that_zero3_keeps_elsewhere():
    weight = torch.empty(0)
    weight.ds_numel = V * H
    refused(ConfigError, lambda: ll.LMHead(weight), "LMHead: weight is sharded", "ZeRO-3", "logitless.install")


def test_a_weight_that_fsdp1_keeps_as_a_part_of_one_row():
    weight = nn.Parameter(torch.zeros(V * H // 2))
    weight._fsdp_flattened = True
    for make in (lambda: ll.LMHead(weight), lambda: ll.LowRank(weight, WEIGHT)):
        refused(ConfigError, make, "is sharded (FSDP, ", "logitless.install")
    whole, bias = nn.Parameter(WEIGHT), nn.Parameter(BIAS)
    whole._fsdp_flattened = bias._fsdp_flattened = True  # as FSDP1 gathers them
    assert ll.LMHead(whole, bias).bias is bias


@pytest.mark.parametrize(
    ("register", "kind"),
    [
        ("register_forward_hook", "forward hook"),
        ("register_forward_pre_hook", "forward pre-hook"),
        ("register_full_backward_hook", "backward hook"),
        ("register_full_backward_pre_hook", "backward pre-hook"),
    ],
)
def test_hooks_that_may_change_the_logits_or_gradients(register, kind):
    linear = nn.Linear(H, V)
    handle = getattr(linear, register)(partial(lambda *_: None))
    refused(ConfigError, lambda: ll.LMHead.of(linear), f"a {kind} of {__name__}, which may change")
    handle.remove()
    ll.LMHead.of(linear)


def test_a_forward_that_was_replaced():
    linear = nn.Linear(H, V)
    usual = linear.forward
    linear.forward = lambda hidden: 2 * usual(hidden)
    refused(ConfigError, lambda: ll.LMHead.of(linear), f"a replaced forward of {__name__}, which may change")
    linear.forward = usual
    ll.LMHead.of(linear)


def test_hooks_of_accelerate():
    hooks = pytest.importorskip("accelerate.hooks")

    class Doubled(hooks.ModelHook):
        def post_forward(self, module, output):
            return 2 * output

    moves = hooks.AlignDevicesHook("cpu")
    for hook in (Doubled(), hooks.SequentialHook(moves, Doubled())):
        hooked = hooks.add_hook_to_module(nn.Linear(H, V), hook)
        refused(ConfigError, lambda: ll.LMHead.of(hooked), f"a replaced forward of {__name__}")  # noqa: B023
    ll.LMHead.of(hooks.add_hook_to_module(nn.Linear(H, V), moves))
    pruned = hooks.add_hook_to_module(prune.l1_unstructured(nn.Linear(H, V), "weight", 0.3), moves)
    with torch.no_grad():
        pruned.weight_orig.mul_(2)
    assert torch.equal(ll.LMHead.of(pruned).weight, pruned.weight_orig * pruned.weight_mask)


def test_hooks_in_a_compiled_function():
    linear = nn.Linear(H, V)
    linear.register_forward_hook(lambda module, given, output: 2 * output)

    @torch.compile(backend="eager")
    def loss(hidden, labels):
        return ll.linear_cross_entropy(hidden, ll.LMHead.of(linear), labels)

    refused(ConfigError, lambda: loss(torch.randn(2, H), torch.zeros(2, dtype=torch.int64)), f"hook of {__name__}")


def test_a_forward_that_was_compiled():
    linear = nn.Linear(H, V)
    linear.forward = torch.compile(linear.forward, backend="eager")
    assert ll.LMHead.of(linear).weight is linear.weight


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_steps_of_a_weight_that_a_hook_makes_in_a_compiled_function():
    linear, hidden, labels = nn.utils.weight_norm(nn.Linear(H, V)), torch.randn(6, H), torch.randint(V, (6,))

    @torch.compile(backend="aot_eager")
    def loss(hidden, labels):
        return ll.linear_cross_entropy(hidden, ll.LMHead.of(linear), labels)

    for _ in range(3):
        ours = loss(hidden, labels)
        ours.backward()
        torch.testing.assert_close(ours, nn.functional.cross_entropy(linear(hidden), labels))
        with torch.no_grad():
            for x in linear.parameters():
                x -= 0.5 * x.grad
                x.grad = None


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_hooks_that_make_the_weight():
    """It is what the layer's next call would multiply with, not what its last one did, and leads to its gradients."""
    hidden, labels = torch.randn(6, H), torch.randint(V, (6,))
    for make in (nn.utils.weight_norm, nn.utils.spectral_norm, lambda x: prune.l1_unstructured(x, "weight", 0.3)):
        linear = make(nn.Linear(H, V)).eval()
        for _ in range(2):
            with torch.no_grad():
                for x in linear.parameters():
                    x.mul_(torch.rand_like(x))
            losses = (
                ll.linear_cross_entropy(hidden, ll.LMHead.of(linear), labels),
                nn.functional.cross_entropy(linear(hidden), labels),
            )
            ours, dense = (torch.autograd.grad(x, list(linear.parameters())) for x in losses)
            for x, y in zip((losses[0], *ours), (losses[1], *dense), strict=True):
                torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-6)


def test_whole_numbers_of_any_kind():
    for size in (4, np.int64(4), torch.tensor(4)):
        head = ll.LMHead(WEIGHT, vocab_size=size)
        assert type(head.vocab_size) is int
        assert head.rows == 4


@pytest.mark.parametrize("kind", [np.float16, np.float32, Fraction])
def test_transforms_of_any_kind(kind):
    """A narrow number or a fraction computes as the float that it is."""
    weight, a, b, hidden = (torch.randn(shape, dtype=torch.float64) for shape in ((V, H), (2, H), (V, 2), (6, H)))
    labels, adapter = torch.randint(V, (6,)), ll.LowRank(a, b, scaling=kind(0.25), dropout=kind(0))
    loss = ll.linear_cross_entropy(hidden, ll.LMHead(weight, None, kind(1.5), kind(5), adapters=(adapter,)), labels)
    z = 5 * torch.tanh(1.5 * hidden @ (weight + 0.25 * b @ a).T / 5)
    torch.testing.assert_close(loss, nn.functional.cross_entropy(z, labels), rtol=1e-13, atol=0)


@pytest.mark.parametrize("name", ["final_logit_softcapping", "logit_scale"])
def test_a_configuration_whose_transforms_are_no_numbers(name):
    config = SimpleNamespace(**{"model_type": "x", name: "30,0"})
    refused(ConfigError, lambda: transforms_of(config, "X"), f"config.json: {name}: expected a number, got '30,0'")
