"""What a call refuses about its options: names, numbers, and statistics without what they need."""

import re
from functools import partial

import numpy
import pytest
import torch
from torch.autograd import forward_ad

import logitless as ll
from logitless.errors import BackendError, DeviceError, DtypeError, GradientError, OptionError, ShapeError
from tests.support.vocab.refusing import (
    BIAS,
    HIDDEN,
    LABELS,
    NAN,
    WEIGHT,
    H,
    V,
    refused,
    refused_everywhere,
)


@pytest.mark.parametrize(
    ("got", "nearest"),
    [("entropie", "'entropy'"), ("logprobs", "'logprob'"), ("self_certain", "'self_certainty'"), ("KL", None)],
)
def test_unknown_statistic(got, nearest):
    fragments = ("want: expected names among logprob, ", f"got {got!r}", *([f"did you mean {nearest}"] * bool(nearest)))
    refused_everywhere(OptionError, fragments, want=("logprob", got))
    refused_everywhere(OptionError, fragments, want=got)


@pytest.mark.parametrize(
    ("got", "option"), [("top_k", "top_k=k"), ("top_k_ids", "top_k=k"), ("candidate_logits", "candidates=ids")]
)
def test_statistics_that_an_option_asks_for(got, option):
    refused_everywhere(OptionError, ("want: expected names among", f"got {got!r}; pass {option}"), want=(got,))


@pytest.mark.parametrize(("got", "nearest"), [("temprature", "'temperature'"), ("candidate", "'candidates'")])
def test_unknown_option(got, nearest):
    args = (HIDDEN, ll.LMHead(WEIGHT), LABELS)
    fragments = (f"{got!r}", f"did you mean {nearest}?")
    refused(OptionError, lambda: ll.token_loss(lambda s: s.logprob, *args, **{got: 1}), *fragments)
    refused(OptionError, lambda: ll.explain(*args, **{got: 1}), *fragments)


def test_misspelt_arguments_that_are_not_the_passs():
    args = (HIDDEN, ll.LMHead(WEIGHT), LABELS)
    for got, meant in (("label_smooting", "label_smoothing"), ("zloss", "z_loss"), ("reductoin", "reduction")):
        refused(OptionError, lambda got=got: ll.linear_cross_entropy(*args, **{got: 0}), f"did you mean {meant!r}?")
    refused(OptionError, lambda: ll.linear_cross_entropy(*args, xyz=1), "they are weight, reduction, label_smoothing")
    refused(OptionError, lambda: ll.token_loss(lambda s: s.logprob, *args, input=()), "did you mean 'inputs'?")
    refused(OptionError, lambda: ll.explain(*args, los=True), "did you mean 'loss'?")
    refused(OptionError, lambda: ll.explain(*args, reduction="sum"), "called 'reduction'; they are want, temperature")


def test_unknown_option_like_no_other():
    args = (lambda s: s.logprob, HIDDEN, ll.LMHead(WEIGHT), LABELS)
    refused(OptionError, lambda: ll.token_loss(*args, xyz=1), "'xyz'", "they are want, temperature")


@pytest.mark.parametrize(
    "got", [0, 0.0, -1.0, NAN, float("inf"), 1e-40, 1e300, numpy.float16(0), numpy.float16("inf"), True, "1", None]
)
def test_temperature(got):
    refused_everywhere(
        OptionError, ("temperature: expected a number in 1e-24..1e+26 or a tensor", f"got {got!r}"), temperature=got
    )


@pytest.mark.parametrize("got", [None, "x", 2**63, -(2**63) - 1, 1.5, True])
def test_ignore_index(got):
    refused_everywhere(OptionError, ("ignore_index: expected an integer", f"got {got!r}"), ignore_index=got)


@pytest.mark.parametrize("last", [-(2**63), 2**63 - 1])
def test_ignore_index_of_all_64_bits(last):
    labels = LABELS.clone()
    labels[0, 0] = last
    found = ll.token_stats(HIDDEN, ll.LMHead(WEIGHT), labels, ignore_index=last).logprob
    assert torch.equal(found != 0, labels != last)


def test_numbers_of_other_libraries():
    args = HIDDEN, ll.LMHead(WEIGHT), LABELS
    plain = ll.linear_cross_entropy(*args, label_smoothing=0.1, z_loss=0.2)
    options = {"label_smoothing": torch.tensor(0.1), "z_loss": numpy.float64(0.2), "ignore_index": numpy.int64(-100)}
    torch.testing.assert_close(ll.linear_cross_entropy(*args, **options), plain)


@pytest.mark.parametrize("got", [None, "x", -1, NAN])
@pytest.mark.parametrize("name", ["label_smoothing", "z_loss", "denominator"])
def test_numbers_of_cross_entropy(name, got):
    def call():
        return ll.linear_cross_entropy(HIDDEN, ll.LMHead(WEIGHT), LABELS, **{name: got})

    if name == "denominator" and got is None:
        call()
    else:
        refused(OptionError, call, f"{name}: expected a ", f"got {got!r}")


@pytest.mark.parametrize("got", [torch.full((2, 300), 0.1), numpy.full((2, 300), 0.1)], ids=["tensor", "array"])
@pytest.mark.parametrize("name", ["label_smoothing", "z_loss", "denominator"])
def test_several_numbers_in_the_place_of_one(name, got):
    call = partial(ll.linear_cross_entropy, HIDDEN, ll.LMHead(WEIGHT), LABELS, **{name: got})
    refused(OptionError, call, f"{name}: expected ")


def test_want_as_any_collection():
    """A set has an order of its own in every process, which ranks would find unlike."""
    args, want = (HIDDEN, ll.LMHead(WEIGHT), LABELS), ("entropy", "label_logit", "logprob", "max_logit", "rank")
    for given in ((name for name in want), list(want), set(want), frozenset(want)):
        assert (*vars(ll.token_stats(*args, want=given)),) == want


def test_want_that_is_no_tuple():
    refused_everywhere(OptionError, ("want: expected names of statistics", "got None"), want=None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("got", [0.0, -1.0, NAN, float("inf")])
def test_one_wrong_temperature_among_many(got, dtype):
    temperature = torch.ones(2, 3, dtype=dtype)
    temperature[1, 1] = got
    refused_everywhere(
        OptionError, ("temperature: expected values in 1e-24..1e+26", "got some"), temperature=temperature
    )


@pytest.mark.parametrize("shape", [(2,), (3, 2), (6,), (1, 2, 3)])
def test_temperature_shape(shape):
    fragments = ("temperature: expected a number or a shape that broadcasts to (2, 3)", f"got {shape}")
    refused_everywhere(ShapeError, fragments, temperature=torch.ones(shape))


def test_complex_numbers_are_refused():
    """Whose imaginary part a conversion would drop."""
    got, said = torch.tensor(1 + 2j), "expected real numbers, got torch.complex64"
    refused_everywhere(DtypeError, (f"temperature: {said}",), temperature=got)
    args = HIDDEN, ll.LMHead(WEIGHT), LABELS
    refused(DtypeError, lambda: ll.linear_cross_entropy(*args, denominator=got), f"denominator: {said}")
    refused(DtypeError, lambda: ll.sample_tokens(*args[:2], temperature=got), f"temperature: {said}")


def test_temperature_that_wants_a_gradient():
    temperature = torch.ones(2, 3, requires_grad=True)
    refused_everywhere(GradientError, ("temperature", "gradient", "detach()"), temperature=temperature)


@pytest.mark.parametrize("got", [V + 1, -1, True, False, 2.0, None])
def test_top_k(got):
    refused_everywhere(OptionError, ("top_k: expected a whole number in 0..9", f"got {got!r}"), top_k=got)


def test_top_k_of_all_entries():
    found = ll.token_stats(HIDDEN, ll.LMHead(WEIGHT), LABELS, top_k=V).top_k_logits
    torch.testing.assert_close(found, (HIDDEN @ WEIGHT.T).sort(-1, descending=True).values)


@pytest.mark.parametrize("got", [0, 0.0, 1, 1.0, -0.5, 1.5, NAN, None, torch.tensor(0.5)])
def test_jsd_beta(got):
    refused_everywhere(OptionError, ("jsd_beta: expected 0 < beta < 1", f"got {got!r}"), jsd_beta=got)


@pytest.mark.parametrize("got", [0, -1, NAN, True])
def test_memory_budget(got):
    fragments = ("memory_budget: expected a positive number of bytes or None", f"got {got}")
    refused_everywhere(OptionError, fragments, memory_budget=got)
    args = (HIDDEN, ll.LMHead(WEIGHT), LABELS)
    refused(OptionError, lambda: ll.linear_cross_entropy(*args, memory_budget=got), *fragments)


@pytest.mark.parametrize("got", [numpy.array(["mean", "sum"]), numpy.array([1, 2])], ids=str)
def test_words_that_are_arrays(got):
    args = HIDDEN, ll.LMHead(WEIGHT), LABELS
    refused(OptionError, lambda: ll.linear_cross_entropy(*args, reduction=got), "reduction: expected 'mean'")
    for name, expected in (("reduction", "reduction: expected 'mean'"), ("per", "per: expected 'token'")):
        refused(OptionError, lambda n=name: ll.token_loss(lambda s: s.logprob, *args, **{n: got}), expected)


@pytest.mark.parametrize("got", [numpy.array("entropy"), torch.tensor(1.0)], ids=str)
def test_want_that_is_an_array_of_one(got):
    refused_everywhere(OptionError, ("want: expected names of statistics in a tuple",), want=got)


@pytest.mark.parametrize("got", [numpy.str_("much"), numpy.array("much"), torch.empty((), device="meta")], ids=repr)
def test_weights_that_are_no_numbers(got):
    args = HIDDEN, ll.LMHead(WEIGHT), LABELS
    for name in ("label_smoothing", "z_loss"):
        refused(OptionError, lambda n=name: ll.linear_cross_entropy(*args, **{n: got}), f"{name}: expected a")


def test_numbers_on_meta():
    got = torch.empty((), device="meta")
    refused_everywhere(DeviceError, ("temperature is on meta, hidden on cpu",), temperature=got)
    args = HIDDEN, ll.LMHead(WEIGHT), LABELS
    refused(DeviceError, lambda: ll.linear_cross_entropy(*args, denominator=got), "denominator is on meta")


def test_infinite_memory_budget():
    refused_everywhere(OptionError, ("memory_budget: expected", "got inf"), memory_budget=float("inf"))


def test_backend_by_another_name():
    fragments = ("backend: expected one of compiled, eager", "or None", "got 'egaer'", "did you mean 'eager'?")
    refused_everywhere(BackendError, fragments, backend="egaer")
    refused_everywhere(BackendError, ("backend: expected one of", "got 'cuda'"), backend="cuda")
    for other in (3, ["eager"], {}, numpy.array("eager"), numpy.array(["eager", "triton"])):
        refused_everywhere(BackendError, ("backend: expected one of", f"got {other!r}"), backend=other)
    args = (HIDDEN, ll.LMHead(WEIGHT), LABELS)
    refused(BackendError, lambda: ll.linear_cross_entropy(*args, backend="egaer"), *fragments)


@pytest.mark.parametrize("name", ["logprob", "label_logit", "rank"])
def test_statistics_of_the_label_without_labels(name):
    fragments = (f"want: {name!r} needs labels", "got None", f"pass labels, or leave {name!r} out of want")
    refused_everywhere(OptionError, fragments, labels=None, want=(name,))


def test_a_cross_entropy_without_labels():
    refused(
        DtypeError,
        lambda: ll.linear_cross_entropy(HIDDEN, ll.LMHead(WEIGHT), None),
        "labels: expected a tensor of integer ids, got NoneType",
    )


@pytest.mark.parametrize("name", ["kl", "reverse_kl", "jsd"])
def test_divergences_without_a_reference(name):
    refused_everywhere(OptionError, (f"want: {name} compares", "reference=(hidden, head)"), want=(name, "logprob"))


@pytest.mark.parametrize("got", ["average", "MEAN", None])
def test_reduction(got):
    args = (HIDDEN, ll.LMHead(WEIGHT), LABELS)
    fragments = ("reduction: expected 'mean', 'sum' or 'none'", f"got {got!r}")
    refused(OptionError, lambda: ll.token_loss(lambda s: s.logprob, *args, reduction=got), *fragments)


@pytest.mark.parametrize(
    ("name", "todo"),
    [
        ("entropy", "add 'entropy' to want"),
        ("kl", "add 'kl' to want"),
        ("top_k_ids", "pass top_k=k"),
        ("top_k_logits", "pass top_k=k"),
        ("candidate_logits", "pass candidates=ids"),
        ("entropie", "statistics are logprob, "),
    ],
)
def test_a_statistic_that_was_not_asked_for(name, todo):
    stats = ll.token_stats(HIDDEN, ll.LMHead(WEIGHT), LABELS)
    with pytest.raises(AttributeError, match=re.escape(todo)) as caught:
        getattr(stats, name)
    assert name in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not hasattr(stats, name)


@pytest.mark.parametrize("transform", ["grad", "vmap", "jvp"])
def test_under_torch_func(transform):
    """autograd.Function would complain of its own workings there."""
    head = ll.LMHead(WEIGHT)

    def call(hidden):
        return ll.token_stats(hidden, head, LABELS[0]).logprob.sum()

    calls = {
        "grad": lambda: torch.func.grad(call)(HIDDEN[0]),
        "vmap": lambda: torch.func.vmap(call)(HIDDEN),
        "jvp": lambda: torch.func.jvp(call, (HIDDEN[0],), (HIDDEN[0],)),
    }
    refused(GradientError, calls[transform], "got a call under torch.func", "use torch.autograd.grad")


@pytest.mark.parametrize("what", ["hidden", "weight", "bias", "adapter", "temperature", "inputs"])
def test_forward_mode(what):
    """A tangent would be lost without a word."""
    with forward_ad.dual_level():
        x = {"hidden": HIDDEN, "weight": WEIGHT, "bias": BIAS, "adapter": torch.ones(V, 2), "inputs": torch.ones(2, 3)}
        x["temperature"] = torch.ones(2, 3)
        ll.linear_cross_entropy(HIDDEN, ll.LMHead(WEIGHT), LABELS)
        x[what] = forward_ad.make_dual(x[what], torch.ones_like(x[what]))
        head = ll.LMHead(x["weight"], x["bias"], adapters=(ll.LowRank(torch.ones(2, H), x["adapter"]),))
        given = {"temperature": x["temperature"]}
        calls = [
            lambda: ll.token_loss(lambda s, r: r * s.logprob, x["hidden"], head, LABELS, inputs=(x["inputs"],), **given)
        ]
        if what != "inputs":
            calls.append(lambda: ll.linear_cross_entropy(x["hidden"], head, LABELS, **given))
        for call in calls:
            refused(GradientError, call, "got a dual one", "use torch.autograd.grad")
