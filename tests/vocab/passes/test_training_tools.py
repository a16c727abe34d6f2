"""The pass under the tools that people train with: compile, autocast, checkpointing, accumulation, DDP."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import logitless as ll
from tests.support import forked
from tests.support.vocab.comparing import assert_near_in_norm

V, H = 61, 16


class Model(nn.Module):
    """A body, a head, and what users compute from them."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what
        self.body = nn.Linear(H, H)
        self.lm_head = nn.Linear(H, V)

    def forward(self, x, labels):
        hidden, head = torch.tanh(self.body(x)), ll.LMHead.of(self.lm_head)
        if self.what == "cross_entropy":
            return ll.linear_cross_entropy(hidden, head, labels, label_smoothing=0.1, z_loss=1e-2)
        if self.what == "token_loss":
            loss = ll.token_loss(
                lambda s: -s.logprob - 0.1 * s.entropy, hidden, head, labels, want=("logprob", "entropy")
            )
            return loss * 2
        stats = ll.token_stats(hidden, head, labels, want=("logprob", "entropy", "max_logit", "rank"), top_k=2)
        return (stats.logprob * 2 - stats.entropy).mean() + stats.top_k_logits.sum() + stats.max_logit.mean()


def model(what, dtype=torch.float32):
    torch.manual_seed(1)
    return Model(what).to(dtype)


def batch(n=13):
    torch.manual_seed(2)
    labels = torch.randint(V, (n,))
    labels[1] = -100
    return torch.randn(n, H), labels


def grads(module, loss):
    return torch.autograd.grad(loss, list(module.parameters()))


def assert_same(got, expected, tolerance=1e-6):
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.compiled
@pytest.mark.parametrize("what", ["cross_entropy", "token_stats"])
@pytest.mark.parametrize("frozen", [False, True])
def test_compiles_without_a_graph_break(what, frozen):
    module = model(what)
    module.lm_head.requires_grad_(not frozen)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    trained = [p for p in module.parameters() if p.requires_grad]
    loss, expected = compiled(*batch()), module(*batch())
    torch.testing.assert_close(loss, expected)
    assert_same(torch.autograd.grad(loss * 3, trained), torch.autograd.grad(expected * 3, trained))


@pytest.mark.compiled
def test_compiles_for_other_numbers():
    """A number that changes is an input of the graph from its second value on."""
    hidden, labels = batch()
    weight = torch.randn(V, H)

    def run(hidden, smoothing, z_loss):
        return ll.linear_cross_entropy(hidden, ll.LMHead(weight), labels, label_smoothing=smoothing, z_loss=z_loss)

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    for numbers in ((0.1, 1e-4), (0.2, 1e-4), (0.2, 2e-4)):
        torch.testing.assert_close(compiled(hidden, *numbers), run(hidden, *numbers))


@pytest.mark.compiled
def test_compiles_with_every_option():
    hidden, labels = batch()
    weight, ref = torch.randn(V, H, requires_grad=True), torch.randn(V, H)
    want = ("logprob", "self_certainty", "kl", "reverse_kl", "jsd", "sum_sq_prob")
    ids = torch.randint(V, (13, 3))

    def run(hidden, weight, temperature):
        stats = ll.token_stats(
            *(hidden, ll.LMHead(weight, softcap=5.0, scale=1.5, vocab_size=50), labels.clamp(max=49)),
            want=want,
            temperature=temperature,
            candidates=ids.clamp(max=49),
            reference=(hidden.detach() + 1, ll.LMHead(ref, vocab_size=50)),
        )
        return sum(getattr(stats, name).sum() for name in want) + stats.candidate_logits.sum()

    hidden = hidden.requires_grad_()
    for temperature in (0.7, torch.rand(13) + 0.5):
        compiled = torch.compile(run, fullgraph=True, backend="aot_eager")(hidden, weight, temperature)
        expected = run(hidden, weight, temperature)
        torch.testing.assert_close(compiled, expected)
        assert_same(
            torch.autograd.grad(compiled, (hidden, weight)), torch.autograd.grad(expected, (hidden, weight)), 1e-5
        )


@pytest.mark.compiled
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo looks at its input
def test_token_loss_breaks_the_graph_once():
    module = model("token_loss")
    found = torch._dynamo.explain(module)(*batch())
    assert found.graph_break_count == 1
    loss, expected = torch.compile(module, backend="aot_eager")(*batch()), module(*batch())
    torch.testing.assert_close(loss, expected)
    assert_same(grads(module, loss), grads(module, expected))


@pytest.mark.parametrize("what", ["cross_entropy", "token_stats", "token_loss"])
def test_autocast_multiplies_in_its_dtype_and_keeps_fp32_numbers(what):
    """As float64 has it of hidden states and a weight that bf16 has rounded; the bias stays as it is."""
    module, (x, labels) = model(what), batch()
    module.body = nn.Identity()
    leaves = [x.requires_grad_(), *module.lm_head.parameters()]
    with torch.autocast("cpu", torch.bfloat16):
        loss = module(x, labels)
    found = torch.autograd.grad(loss, leaves)
    assert {loss.dtype, *(g.dtype for g in found)} == {torch.float32}
    rounded = model(what, torch.float64)
    rounded.body = nn.Identity()
    rounded.lm_head.weight.data = module.lm_head.weight.bfloat16().double()
    y = torch.atanh(torch.tanh(x).bfloat16().double()).detach().requires_grad_()
    expected = rounded(y, labels)
    torch.testing.assert_close(loss.double(), expected, rtol=5e-7, atol=5e-7)  # unrounded: 1e-5 to 2e-3 away
    for grad, want in zip(found, torch.autograd.grad(expected, [y, *rounded.lm_head.parameters()]), strict=True):
        assert_near_in_norm(grad, want, 2**-7)


@pytest.mark.parametrize("what", ["cross_entropy", "token_stats", "token_loss"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(what, reentrant):
    module, (x, labels) = model(what), batch()
    x = x.requires_grad_()
    loss = checkpoint(module, x, labels, use_reentrant=reentrant)
    module.zero_grad()
    loss.backward()
    got = [x.grad, *(p.grad for p in module.parameters())]
    assert_same(got, torch.autograd.grad(module(x, labels), [x, *module.parameters()]))


@pytest.mark.parametrize("what", ["cross_entropy", "token_loss"])
def test_gradient_accumulation(what):
    module, (x, labels) = model(what), batch(12)
    labels[1] = 3  # micro-batches of one size
    for part in range(3):
        rows = slice(4 * part, 4 * part + 4)
        (module(x[rows], labels[rows]) / 3).backward()
    got = [p.grad for p in module.parameters()]
    assert_same(got, grads(module, module(x, labels)))


def test_grad_scaler():
    module, (x, labels) = model("cross_entropy"), batch()
    expected = grads(module, module(x, labels))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
    scaler.scale(module(x, labels)).backward()
    scaler.unscale_(optimizer)
    assert_same([p.grad for p in module.parameters()], expected)


@pytest.mark.parametrize("what", ["cross_entropy", "token_stats", "token_loss"])
def test_without_gradients(what):
    module = model(what)
    expected = module(*batch())
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            got = module(*batch())
        assert not got.requires_grad
        torch.testing.assert_close(got, expected.detach())


def test_two_ranks_give_the_gradient_of_one_process():
    forked.ranks("tests.support.vocab.data_ranks")
