"""The custom operators: schema, fake kernels and autograd as torch's own checker asks for them."""

import pytest
import torch
from torch.autograd import forward_ad

import logitless as ll
from logitless import relax
from logitless.algebra.stats import cross_entropy_wants
from logitless.errors import GradientError
from logitless.sample import Noise
from logitless.vocab.api import linear_cross_entropy, token_stats
from logitless.vocab.call.call import Call, Needs
from logitless.vocab.call.lora import with_lora
from logitless.vocab.call.validate import flatten
from logitless.vocab.passes.operators import _key, _packed
from tests.support.vocab.comparing import EVERYTHING, Operands, operands

CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor")
FROZEN = ("hidden", "a")  # kept as u-vectors of hidden and of the adapters
TRAINABLE = [("hidden", "weight", "bias", "a", "b"), FROZEN, ("b",), ()]
pytestmark = pytest.mark.compiled


def prepared(ops: Operands, **options) -> Call:
    call = flatten(ops.hidden, ops.head, ops.labels, reference=ops.reference, **options)
    return with_lora(call, None if ops.ref is None else ops.ref.head)


@pytest.mark.parametrize("ranks", [(), (3,)], ids=str)
@pytest.mark.parametrize("trainable", TRAINABLE, ids=str)
@pytest.mark.parametrize(
    ("want", "options"),
    [
        (("logprob", "entropy"), {"top_k": 2}),
        (("rank", "max_logit"), {}),
        (("logprob", "tail_logprob"), {"candidates": torch.randint(9, (7, 2))}),
        (EVERYTHING, {"candidates": torch.randint(9, (7, 2)), "temperature": torch.rand(7) + 0.5}),
    ],
    ids=len,
)
def test_stats(want, options, trainable, ranks):
    ops = operands((7,), dtype=torch.float32, reference="kl" in want, ranks=ranks, softcap=5.0 if options else None)
    ops = ops.training(*trainable)
    ops.labels[2] = -100
    call = prepared(ops, want=want, **options)
    args = (*_packed(call.inputs), _key(call), list(Needs.of(call.inputs)))
    torch.library.opcheck(torch.ops.logitless.stats.default, args, test_utils=CHECKS)


@pytest.mark.parametrize("ranks", [(), (3,)], ids=str)
@pytest.mark.parametrize("trainable", TRAINABLE, ids=str)
@pytest.mark.parametrize("denominator", [None, torch.tensor(5.0)], ids=str)
@pytest.mark.parametrize("weights", [None, torch.rand(23)], ids=lambda x: "weighted" if x is not None else "")
def test_cross_entropy(weights, denominator, trainable, ranks):
    ops = operands((7,), dtype=torch.float32, ranks=ranks).training(*trainable)
    call = prepared(ops, want=cross_entropy_wants(0.1, 0.0))
    inputs = call.inputs._replace(class_weights=weights)
    args = (*_packed((*inputs, denominator)), _key(call), list(Needs.of(inputs)), 0.1, 0.0, True)
    torch.library.opcheck(torch.ops.logitless.cross_entropy.default, args, test_utils=CHECKS)


@pytest.mark.parametrize("trainable", [("hidden", "a"), ("hidden",), ("a",), ()], ids=str)
@pytest.mark.parametrize("keeps", [False, True], ids=["all", "some"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_lora_hidden(dtype, keeps, trainable):
    ops = operands((7,), dtype=dtype, ranks=(3,)).training(*trainable)
    args = (ops.hidden, ops.head.adapters[0].a, torch.rand(7, 1) < 0.5 if keeps else None)
    torch.library.opcheck(torch.ops.logitless.lora_hidden.default, args, test_utils=CHECKS)


def test_gradients_of_adapters_keep_their_digits_under_autocast():
    """As the eager call's; torch multiplies in a compiled graph's backward as autocast around the call says."""
    ops = operands((7,), dtype=torch.bfloat16, ranks=(3,)).training("hidden", "a", "b")

    def run(*leaves):
        return linear_cross_entropy(ops.hidden, ops.head, ops.labels)

    leaves = list(ops.leaves.values())
    with torch.autocast("cpu", torch.bfloat16):
        expected = torch.autograd.grad(run(*leaves), leaves)
        got = torch.autograd.grad(torch.compile(run, fullgraph=True, backend="aot_eager")(*leaves), leaves)
    assert all(map(torch.equal, got, expected))


def test_nan_in_an_ignored_row_reaches_no_adapter():
    ops = operands((7,), ranks=(3,)).training("hidden", "a", "b")
    ops.labels[2] = -100
    with torch.no_grad():
        ops.hidden[2] = torch.nan

    @torch.compile(fullgraph=True, backend="aot_eager")
    def run(*leaves):
        return linear_cross_entropy(ops.hidden, ops.head, ops.labels)

    leaves = list(ops.leaves.values())
    assert all(x.isfinite().all() for x in torch.autograd.grad(run(*leaves), leaves))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_gradients_are_rounded_after_the_loss_scale(dtype):
    """A mean's gradients below fp16's smallest number, which a loss scale lifts above it: the eager call's bits."""
    ops = operands((4096,), 16, 64, dtype=dtype, ranks=(3,)).training("hidden", "weight", "bias", "a", "b")

    weight = torch.rand(64)

    def run(*leaves):
        loss = linear_cross_entropy(ops.hidden, ops.head, ops.labels)
        weighted = linear_cross_entropy(ops.hidden, ops.head, ops.labels, weight=weight, label_smoothing=0.1)
        return 65536.0 * (loss + weighted)

    leaves = list(ops.leaves.values())
    expected = torch.autograd.grad(run(*leaves), leaves)
    got = torch.autograd.grad(torch.compile(run, fullgraph=True, backend="aot_eager")(*leaves), leaves)
    for x, a, b in zip(leaves, got, expected, strict=True):
        assert a.dtype == x.dtype
        assert torch.equal(a, b)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_class_weights_of_a_single_token(reduction):
    ops, weight = operands((), 7, 31, dtype=torch.float32), torch.rand(31)

    def run(hidden):
        return linear_cross_entropy(hidden, ops.head, ops.labels, weight=weight, reduction=reduction)

    torch.testing.assert_close(torch.compile(run, fullgraph=True, backend="aot_eager")(ops.hidden), run(ops.hidden))


def test_several_upstream_gradients_at_once_are_refused_in_one_line():
    ops = operands((3,), 7, 503, dtype=torch.float32)

    def run(hidden):
        return token_stats(hidden, ops.head, ops.labels).logprob

    logprob = torch.compile(run, backend="aot_eager")(ops.hidden.requires_grad_())
    with pytest.raises(GradientError, match="expected one upstream gradient"):
        torch.autograd.grad(logprob, ops.hidden, torch.eye(3), is_grads_batched=True)


def test_a_second_derivative_is_refused_where_the_operators_own_backward_runs():
    """torch's own tracing of backward refuses it by itself; the backend "eager" has none."""
    hidden, weight = torch.randn(5, 4, requires_grad=True), torch.randn(9, 4, requires_grad=True)

    def loss(h, w):
        return ll.linear_cross_entropy(h, ll.LMHead(w), torch.arange(5))

    def entropy(h, w):
        return ll.token_stats(h, ll.LMHead(w), want=("entropy",)).entropy.sum()

    for function in (loss, entropy):
        compiled = torch.compile(function, backend="eager")
        with pytest.raises(GradientError, match="create_graph=True"):
            torch.autograd.grad(compiled(hidden, weight), hidden, create_graph=True)


@pytest.mark.parametrize("function", [linear_cross_entropy, lambda *call: token_stats(*call).logprob.sum()])
def test_a_tangent_is_not_lost_in_a_graph(function):
    """Of torch.func.jvp, which the graph holds, and of a dual tensor that a graph made without one gets."""
    hidden, weight, labels = torch.randn(5, 4), torch.randn(9, 4), torch.arange(5)

    def of(weight):
        return function(hidden, ll.LMHead(weight), labels)

    compiled = torch.compile(of, backend="eager")
    with pytest.raises(GradientError, match="got a call under torch"):
        torch.compile(lambda x: torch.func.jvp(of, (x,), (x,)), backend="eager")(weight)
    torch.testing.assert_close(compiled(weight), of(weight))
    with forward_ad.dual_level(), pytest.raises(GradientError, match="got a dual one"):
        compiled(forward_ad.make_dual(weight, weight))


@pytest.mark.parametrize("function", [linear_cross_entropy, token_stats])
def test_a_tangent_of_an_adapter_is_not_lost_in_a_graph(function):
    hidden, weight, labels = torch.randn(5, 4), torch.randn(9, 4), torch.arange(5)
    a, b = torch.randn(2, 4), torch.randn(9, 2)

    @torch.compile(backend="eager")
    def of(a):
        return function(hidden, ll.LMHead(weight, adapters=(ll.LowRank(a, b),)), labels)

    of(a)
    with forward_ad.dual_level(), pytest.raises(GradientError, match="got a dual one"):
        of(forward_ad.make_dual(a, a))


@pytest.mark.parametrize("dynamic", [None, True])
def test_heads_that_were_made_before_with_other_numbers(dynamic):
    """Dynamo takes what differs, or with dynamic=True every number, for a variable."""
    hidden, weight, labels = torch.randn(7, 6), torch.randn(33, 6), torch.randint(20, (7,))

    def loss(head):
        return ll.linear_cross_entropy(hidden, head, labels)

    torch._dynamo.reset()
    compiled = torch.compile(loss, fullgraph=True, backend="eager", dynamic=dynamic)
    for options in ((1.0, None, None), (0.5, 3.0, 30), (0.7, 4.0, 31), (0.9, 5.0, 32)):
        head = ll.LMHead(weight, None, *options)
        torch.testing.assert_close(compiled(head), loss(head))


@pytest.mark.parametrize("what", ["sampled", "nucleus", "soft", "expected", "draft", "top_k", "softcap", "scale"])
def test_other_sizes_and_numbers_than_the_first(what):
    """A second batch size, which dynamo then takes for a variable, and options that are arguments."""
    weight, many = torch.randn(33, 6), torch.randn(70, 6)

    def noise(n):
        return Noise(torch.arange(n), torch.zeros(n, dtype=torch.int64))

    def function(h, number):
        head = ll.LMHead(weight)
        if what == "sampled":
            return ll.sample_tokens(h, head, noise=noise(h.shape[0])).logprob
        if what == "nucleus":
            return ll.sample_tokens(h, head, noise=noise(h.shape[0]), top_p=0.9).logprob
        if what == "soft":
            return relax.gumbel_topk(h, head, 1.0, k=4).weights.sum(-1)  # 1, whatever is drawn
        if what == "expected":
            return relax.expected_embedding(h, head, weight, noise=noise(h.shape[0])).embedding
        if what == "draft":
            draft = ll.LMHead(weight, token_ids=torch.arange(33) * 2)
            return ll.token_stats(h, draft, want=("kl",), reference=(h * 1.1, ll.LMHead(many))).kl
        if what == "top_k":
            return ll.token_stats(h, head, want=("entropy",), top_k=number).top_k_logits.sum(-1)
        if what == "scale":
            lora = ll.LowRank(weight[:2], weight[:, :2], float(number))
            return ll.token_stats(h, ll.LMHead(weight, scale=number / 3, adapters=(lora,)), want=("entropy",)).entropy
        return ll.token_stats(h, ll.LMHead(weight, softcap=float(number)), want=("entropy",)).entropy

    torch._dynamo.reset()
    compiled = torch.compile(function, backend="eager")
    for n, number in ((7, 2), (9, 3), (5, 4), (12, 5)):
        h = torch.randn(n, 6, generator=torch.Generator().manual_seed(n))
        torch.testing.assert_close(compiled(h, number), function(h, number))


def test_exported_saved_and_loaded_for_other_sizes(tmp_path):
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.lm_head = torch.nn.Linear(6, 6), torch.nn.Linear(6, 33)

        def forward(self, x, labels):
            hidden, head = self.body(x), ll.LMHead.of(self.lm_head)
            stats = ll.token_stats(hidden, head, labels, want=("logprob", "entropy"), top_k=3)
            loss = ll.linear_cross_entropy(hidden, head, labels, label_smoothing=0.1)
            return stats.logprob, stats.entropy, stats.top_k_ids, loss

    def batch(rows):
        return torch.randn(rows, 5, 6), torch.randint(33, (rows, 5))

    model, rows = Model(), {0: torch.export.Dim("rows")}
    program = torch.export.export(model, batch(4), dynamic_shapes=(rows, rows))
    torch.export.save(program, tmp_path / "model.pt2")
    loaded = torch.export.load(tmp_path / "model.pt2").module()
    for given in map(batch, (4, 2, 7)):
        torch.testing.assert_close(loaded(*given), model(*given))
