"""What a call refuses about its tensors: shapes, dtypes, devices, ids and the head's own."""

import pytest
import torch
from torch import nn

import logitless as ll
from logitless.errors import DeviceError, DtypeError, LabelError, LogitlessError, OptionError, ShapeError
from tests.support.vocab.refusing import (
    BUILTINS,
    HIDDEN,
    LABELS,
    REF,
    WEIGHT,
    H,
    V,
    everywhere,
    ids,
    refused,
    refused_everywhere,
)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize(
    ("wrong", "got"), [((-1,), -1), ((0, V), V), ((-100, 1, -99), -99), ((10**12,), 10**12), ((-(2**40),), -(2**40))]
)
def test_labels_outside_the_vocabulary(wrong, got, grad):
    head = ll.LMHead(WEIGHT.clone().requires_grad_(grad))
    calls = everywhere(head=head, labels=ids(*wrong))
    calls["linear_cross_entropy"] = lambda: ll.linear_cross_entropy(HIDDEN, head, ids(*wrong))
    del calls["explain"]  # reads no labels
    for call in calls.values():
        hint = f"pass ignore_index={got} if such tokens do not count, else " if got < 0 else ""
        refused(
            LabelError, call, "labels: expected ids in 0..8 or ignore_index=-100", f"got {got}", f"{hint}fix the ids"
        )


def test_the_vocabulary_ends_at_vocab_size():
    head = ll.LMHead(WEIGHT, vocab_size=V - 1)
    ll.token_stats(HIDDEN, head, ids(V - 2))
    refused(LabelError, lambda: ll.token_stats(HIDDEN, head, ids(V - 1)), "0..7", "got 8")


def test_another_ignore_index_makes_the_usual_one_a_label():
    refused(LabelError, lambda: ll.token_stats(HIDDEN, ll.LMHead(WEIGHT), ids(-100), ignore_index=-1), "got -100")


@pytest.mark.parametrize("got", [-1, -100, V])
def test_candidates_outside_the_vocabulary(got):
    candidates = LABELS[..., None].repeat(1, 1, 2)
    candidates[1, 1, 1] = got
    calls = everywhere(candidates=candidates)
    del calls["explain"]
    for call in calls.values():
        refused(LabelError, call, "candidates: expected ids in 0..8", f"got {got}")
    ll.token_stats(HIDDEN, ll.LMHead(WEIGHT), ids(0, 1, 2, 3, -100), candidates=candidates)  # an ignored token's


@pytest.mark.parametrize("shape", [(2, 3, H + 1), (2, 3, 1), (H, 3), ()])
def test_hidden_width(shape):
    fragments = ("hidden: expected (..., 4)", "(9, 4)", f"got {shape}", "rather than its logits")
    refused_everywhere(ShapeError, fragments, hidden=torch.randn(shape))


@pytest.mark.parametrize("options", [{"weight": torch.ones(V)}, {"denominator": 100}], ids=str)
def test_a_cross_entropy_of_what_is_no_head_or_no_hidden_states(options):
    """The same errors as without class weights or a denominator."""
    layer, output = nn.Linear(H, V), object()
    loss = ll.linear_cross_entropy
    refused(DtypeError, lambda: loss(HIDDEN, layer, LABELS, **options), "head: expected an LMHead, got Linear")
    other = type("LMHead", (), {"__module__": "logitless.jax.head"})()
    refused(DtypeError, lambda: loss(HIDDEN, other, LABELS, **options), "an LMHead, got logitless.jax.head.LMHead")
    refused(DtypeError, lambda: loss(output, ll.LMHead(WEIGHT), LABELS, **options), "hidden: expected", "got object")


def test_a_weight_that_is_transposed():
    fragments = ("hidden: expected (..., 9)", "(4, 9)", "got (2, 3, 4)", "a weight (vocab, hidden)")
    refused_everywhere(ShapeError, fragments, head=ll.LMHead(WEIGHT.T))


@pytest.mark.parametrize("shape", [(6,), (3, 2), (2, 3, 1), (2, 4), ()])
def test_label_shape(shape):
    labels = torch.zeros(shape, dtype=torch.long)
    fragments = ("labels: expected shape (2, 3)", f"got {shape}")
    refused_everywhere(ShapeError, fragments, labels=labels)
    refused(ShapeError, lambda: ll.linear_cross_entropy(HIDDEN, ll.LMHead(WEIGHT), labels), *fragments)


@pytest.mark.parametrize("shape", [(2, 3), (6, 2), (2, 3, 1, 2), (2,)])
def test_candidate_rank(shape):
    fragments = ("candidates: expected shape (2, 3, K)", f"got {shape}")
    refused_everywhere(ShapeError, fragments, candidates=torch.zeros(shape, dtype=torch.long))


def test_candidate_leading_dimensions():
    fragments = ("candidates: expected shape (2, 3, 2)", "got (3, 2, 2)")
    refused_everywhere(ShapeError, fragments, candidates=torch.zeros(3, 2, 2, dtype=torch.long))


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("shape", [(6,), (3, 2), (2,), ()])
def test_leading_dimensions_of_inputs(shape, reduction):
    def call():
        args = (lambda s, x: s.logprob * x, HIDDEN, ll.LMHead(WEIGHT), LABELS)
        return ll.token_loss(*args, inputs=(torch.ones(shape),), reduction=reduction)

    refused(ShapeError, call, "inputs: expected leading dimensions (2, 3)", f"got {shape}")


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_inputs_that_are_no_tensors(reduction):
    args = (lambda s, x: s.logprob * x, HIDDEN, ll.LMHead(WEIGHT), LABELS)
    refused(
        *(DtypeError, lambda: ll.token_loss(*args, inputs=(1.5,), reduction=reduction)),
        *("inputs: expected", "got float"),
    )
    refused(DtypeError, lambda: ll.token_loss(*args, inputs=None, reduction=reduction), "inputs", "got NoneType")


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_inputs_elsewhere(reduction):
    args = (lambda s, x: s.logprob * x, HIDDEN, ll.LMHead(WEIGHT), LABELS)
    inputs = (torch.ones(2, 3, device="meta"),)
    refused(DeviceError, lambda: ll.token_loss(*args, inputs=inputs, reduction=reduction), "inputs", "meta", "cpu")


def test_reference_shapes():
    hidden, head = REF
    for wrong in (hidden[:, :2], hidden.flatten(0, 1)):
        fragments = ("reference hidden: expected leading dimensions (2, 3)", f"got {tuple(wrong.shape[:-1])}")
        refused_everywhere(ShapeError, fragments, want=("kl", "logprob"), reference=(wrong, head))
    other = ll.LMHead(torch.randn(V + 1, 5))
    fragments = ("reference: expected a head over the same vocabulary (9 entries)", "got 10", "vocab_size")
    refused_everywhere(ShapeError, fragments, want=("kl", "logprob"), reference=(hidden, other))
    fragments = ("reference hidden: expected (..., 5)", "got (2, 3, 4)")
    refused_everywhere(ShapeError, fragments, want=("kl", "logprob"), reference=(HIDDEN, head))
    padded = ll.LMHead(torch.randn(V + 1, 5), vocab_size=V)
    ll.token_stats(HIDDEN, ll.LMHead(WEIGHT), LABELS, want=("kl",), reference=(hidden, padded))


def test_reference_that_is_no_pair():
    hidden, head = REF
    refused_everywhere(
        ShapeError, ("reference: expected rows of logits or log-probs", "got (2, 3, 5)"), reference=hidden
    )
    refused_everywhere(OptionError, ("reference: expected (hidden, head)", "got LMHead"), reference=head)
    refused_everywhere(
        DtypeError, ("reference head: expected an LMHead", "got Tensor", "LMHead.of"), reference=(hidden, head.weight)
    )
    fragments = ("reference: expected (hidden, head)", "got Linear", "(hidden_states(model, batch), LMHead.of(model))")
    refused_everywhere(OptionError, fragments, reference=nn.Linear(H, V))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.bool, torch.complex64])
def test_label_dtype(dtype):
    fragments = ("labels: expected integer ids", f"got {dtype}")
    refused_everywhere(DtypeError, fragments, labels=LABELS.to(dtype))
    head = ll.LMHead(WEIGHT)
    refused(DtypeError, lambda: ll.linear_cross_entropy(HIDDEN, head, LABELS.to(dtype)), *fragments)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool])
def test_candidate_dtype(dtype):
    candidates = LABELS[..., None].to(dtype)
    refused_everywhere(DtypeError, ("candidates: expected integer ids", f"got {dtype}"), candidates=candidates)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64])
def test_hidden_dtype(dtype):
    fragments = ("hidden: expected a floating-point tensor", f"got {dtype}")
    refused_everywhere(DtypeError, fragments, hidden=HIDDEN.to(dtype))


def test_what_is_no_tensor():
    fragments = ("hidden: expected a floating-point tensor", "got list", "hidden_states(model, batch)")
    refused_everywhere(DtypeError, fragments, hidden=HIDDEN.tolist())
    refused_everywhere(DtypeError, ("labels: expected integer ids", "got list"), labels=LABELS.tolist())
    refused_everywhere(DtypeError, ("head: expected an LMHead", "got Tensor", "LMHead.of"), head=WEIGHT)
    refused_everywhere(DtypeError, ("head: expected an LMHead", "got Linear"), head=nn.Linear(H, V))


def test_a_loss_that_is_no_function():
    args = (HIDDEN, ll.LMHead(WEIGHT), LABELS)
    refused(
        *(OptionError, lambda: ll.token_loss(*args, lambda s: s.logprob)),
        *("loss_fn: expected a function", "got Tensor", "token_loss(loss_fn, hidden, head, labels)"),
    )
    refused(OptionError, lambda: ll.token_loss("nll", *args), "loss_fn: expected a function", "got str")


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_an_error_of_the_loss_says_what_it_was_called_with(reduction):
    args = (HIDDEN, ll.LMHead(WEIGHT), LABELS)
    for loss_fn in (ll.losses.nll, lambda s: s.logprob * torch.ones(2, 3), lambda s, weights: s.logprob * weights):
        with pytest.raises((TypeError, RuntimeError)) as caught:
            ll.token_loss(loss_fn, *args, reduction=reduction)
        (note,) = caught.value.__notes__
        assert "loss_fn(stats, *inputs) with the statistics of 6 tokens and 0 inputs" in note
        assert "\n" not in note


def test_candidates_that_are_no_tensor():
    refused_everywhere(DtypeError, ("candidates: expected integer ids", "got list"), candidates=[[[1], [2], [3]]] * 2)


@pytest.mark.parametrize("name", ["hidden", "labels", "candidates"])
def test_devices(name):
    tensors = {"hidden": HIDDEN, "labels": LABELS, "candidates": LABELS[..., None]}
    tensors[name] = tensors[name].to("meta")
    refused_everywhere(DeviceError, (name, "meta", "cpu", "move one"), **tensors)


def test_devices_of_the_reference():
    hidden, head = REF
    there = (hidden.to("meta"), ll.LMHead(head.weight.to("meta")))
    want = ("kl", "logprob")
    refused_everywhere(DeviceError, ("reference", "meta", "cpu", "move one"), reference=there, want=want)
    split = (hidden, there[1])
    refused_everywhere(DeviceError, ("reference hidden", "cpu", "meta", "move one"), reference=split, want=want)


@pytest.mark.parametrize(("error", "builtin"), BUILTINS.items())
def test_errors_are_the_builtins_that_people_expect(error, builtin):
    assert issubclass(error, LogitlessError)
    assert issubclass(error, builtin)
