"""What a call refuses: a typed error of one line that says what was expected, what was got, what to do."""

import re

import pytest
import torch
from torch import Tensor, nn

import logitless as ll
from logitless.errors import (
    BackendError,
    ConfigError,
    DeviceError,
    DtypeError,
    GradientError,
    LabelError,
    LogitlessError,
    NotFiniteError,
    OptionError,
    ShapeError,
)

N, H, V = 6, 4, 9
HIDDEN, WEIGHT, BIAS = torch.randn(2, 3, H), torch.randn(V, H), torch.randn(V)
LABELS = torch.arange(N).view(2, 3)
REF = (torch.randn(2, 3, 5), ll.LMHead(torch.randn(V, 5)))
NAN = float("nan")
BUILTINS = {
    ShapeError: ValueError,
    DtypeError: TypeError,
    DeviceError: ValueError,
    LabelError: ValueError,
    OptionError: ValueError,
    ConfigError: ValueError,
    BackendError: RuntimeError,
    GradientError: RuntimeError,
    NotFiniteError: ArithmeticError,
}


def ids(*values: int) -> Tensor:
    """Labels of the call's shape with these first."""
    out = LABELS.clone()
    out.view(-1)[: len(values)] = torch.tensor(values)
    return out


def refused(error: type[LogitlessError], call, *fragments: str) -> None:
    """`call` raises exactly this error, on one line, with the fragments in order."""
    with pytest.raises(error) as caught:
        call()
    message = str(caught.value)
    assert type(caught.value) is error
    assert issubclass(error, BUILTINS[error])
    assert "\n" not in message
    assert re.search(".*".join(map(re.escape, fragments)), message), message


def everywhere(hidden=HIDDEN, head=None, labels: Tensor | None = LABELS, **options):
    """Each public function that takes these arguments, as a call without any."""
    args = (hidden, head if head is not None else ll.LMHead(WEIGHT), labels)
    return {
        "token_stats": lambda: ll.token_stats(*args, **options),
        "token_loss": lambda: ll.token_loss(lambda s: s.logprob, *args, **options),
        "token_loss none": lambda: ll.token_loss(lambda s: s.logprob, *args, reduction="none", **options),
        "explain": lambda: ll.explain(*args, **options),
    }


def refused_everywhere(error, fragments, **arguments):
    for call in everywhere(**arguments).values():
        refused(error, call, *fragments)


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
        refused(LabelError, call, "labels: expected ids in 0..8 or ignore_index=-100", f"got {got}", "fix the ids")


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
    fragments = ("hidden: expected (..., 4)", "(9, 4)", f"got {shape}")
    refused_everywhere(ShapeError, fragments, hidden=torch.randn(shape))


@pytest.mark.parametrize("shape", [(6,), (3, 2), (2, 3, 1), (2, 4), ()])
def test_label_shape(shape):
    labels = torch.zeros(shape, dtype=torch.long)
    fragments = ("labels: expected shape (2, 3)", f"got {shape}")
    refused_everywhere(ShapeError, fragments, labels=labels)
    refused(ShapeError, lambda: ll.linear_cross_entropy(HIDDEN, ll.LMHead(WEIGHT), labels), *fragments)


@pytest.mark.parametrize("shape", [(2, 3), (6, 2), (2, 3, 1, 2), (2,)])
def test_candidate_rank(shape):
    fragments = ("candidates: expected shape (2, 3, 'K')", f"got {shape}")
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
    refused_everywhere(OptionError, ("reference: expected (hidden, head)", "got Tensor"), reference=hidden)
    refused_everywhere(OptionError, ("reference: expected (hidden, head)", "got LMHead"), reference=head)
    refused_everywhere(DtypeError, ("expected an LMHead", "got Tensor", "LMHead.of"), reference=(hidden, head.weight))


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
    refused_everywhere(DtypeError, ("hidden: expected a floating-point tensor", "got list"), hidden=HIDDEN.tolist())
    refused_everywhere(DtypeError, ("labels: expected integer ids", "got list"), labels=LABELS.tolist())
    refused_everywhere(DtypeError, ("head: expected an LMHead", "got Tensor", "LMHead.of"), head=WEIGHT)
    refused_everywhere(DtypeError, ("head: expected an LMHead", "got Linear"), head=nn.Linear(H, V))


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


@pytest.mark.parametrize(
    ("got", "nearest"),
    [("entropie", "'entropy'"), ("logprobs", "'logprob'"), ("self_certain", "'self_certainty'"), ("KL", None)],
)
def test_unknown_statistic(got, nearest):
    fragments = ("want: expected names among logprob, ", f"got {got!r}", *([f"did you mean {nearest}"] * bool(nearest)))
    refused_everywhere(OptionError, fragments, want=("logprob", got))
    refused_everywhere(OptionError, fragments, want=got)


@pytest.mark.parametrize(("got", "nearest"), [("temprature", "'temperature'"), ("candidate", "'candidates'")])
def test_unknown_option(got, nearest):
    args = (HIDDEN, ll.LMHead(WEIGHT), LABELS)
    fragments = (f"{got!r}", f"did you mean {nearest}?")
    refused(OptionError, lambda: ll.token_loss(lambda s: s.logprob, *args, **{got: 1}), *fragments)
    refused(OptionError, lambda: ll.explain(*args, **{got: 1}), *fragments)


def test_unknown_option_like_no_other():
    args = (lambda s: s.logprob, HIDDEN, ll.LMHead(WEIGHT), LABELS)
    refused(OptionError, lambda: ll.token_loss(*args, xyz=1), "'xyz'", "they are want, temperature")


@pytest.mark.parametrize("got", [0, 0.0, -1.0, NAN, float("inf"), "1", None])
def test_temperature(got):
    refused_everywhere(
        OptionError, ("temperature: expected a positive number or tensor", f"got {got!r}"), temperature=got
    )


@pytest.mark.parametrize("got", [0.0, -1.0, NAN])
def test_one_wrong_temperature_among_many(got):
    temperature = torch.ones(2, 3)
    temperature[1, 1] = got
    refused_everywhere(OptionError, ("temperature: expected positive", "got some"), temperature=temperature)


@pytest.mark.parametrize("shape", [(2,), (3, 2), (6,), (1, 2, 3)])
def test_temperature_shape(shape):
    fragments = ("temperature: expected a number or a shape that broadcasts to (2, 3)", f"got {shape}")
    refused_everywhere(ShapeError, fragments, temperature=torch.ones(shape))


def test_temperature_that_wants_a_gradient():
    temperature = torch.ones(2, 3, requires_grad=True)
    refused_everywhere(GradientError, ("temperature", "gradient", "detach()"), temperature=temperature)


@pytest.mark.parametrize("got", [V + 1, -1, True, False, 2.0, None])
def test_top_k(got):
    refused_everywhere(OptionError, ("top_k: expected a whole number in 0..9", f"got {got!r}"), top_k=got)


@pytest.mark.parametrize("got", [0, 0.0, 1, 1.0, -0.5, 1.5, NAN])
def test_jsd_beta(got):
    refused_everywhere(OptionError, ("jsd_beta: expected 0 < beta < 1", f"got {got}"), jsd_beta=got)


@pytest.mark.parametrize("got", [0, -1, NAN])
def test_memory_budget(got):
    fragments = ("memory_budget: expected a positive number of bytes or None", f"got {got}")
    refused_everywhere(OptionError, fragments, memory_budget=got)
    args = (HIDDEN, ll.LMHead(WEIGHT), LABELS)
    refused(OptionError, lambda: ll.linear_cross_entropy(*args, memory_budget=got), *fragments)


def test_infinite_memory_budget():
    refused_everywhere(OptionError, ("memory_budget: expected", "got inf"), memory_budget=float("inf"))


def test_backend_by_another_name():
    fragments = ("backend: expected one of eager", "or None", "got 'egaer'", "did you mean 'eager'?")
    refused_everywhere(BackendError, fragments, backend="egaer")
    refused_everywhere(BackendError, ("backend: expected one of", "got 'cuda'"), backend="cuda")
    args = (HIDDEN, ll.LMHead(WEIGHT), LABELS)
    refused(BackendError, lambda: ll.linear_cross_entropy(*args, backend="egaer"), *fragments)


@pytest.mark.parametrize("name", ["logprob", "label_logit", "rank"])
def test_statistics_of_the_label_without_labels(name):
    fragments = (f"want: {name} is the label's", "labels is None", "pass labels or drop it")
    refused_everywhere(OptionError, fragments, labels=None, want=(name,))


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


@pytest.mark.parametrize(("error", "builtin"), BUILTINS.items())
def test_errors_are_the_builtins_that_people_expect(error, builtin):
    assert issubclass(error, LogitlessError)
    assert issubclass(error, builtin)
