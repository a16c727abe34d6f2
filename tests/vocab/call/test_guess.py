"""What is prepared while a device looks at the labels, on the guess that no token is ignored; again where some are."""

import pytest
import torch

import logitless as ll
from logitless.errors import LabelError
from logitless.vocab.backends.chunk import Chunk
from logitless.vocab.call import call as calls
from logitless.vocab.passes import engine
from tests.support.vocab.comparing import operands

N, H, V = 9, 5, 61
WANT = ("logprob", "entropy")


@pytest.fixture
def begun(monkeypatch):
    """How many tokens count in each pass that is begun, where a CPU is guessed about as a GPU is."""
    monkeypatch.setattr(calls, "GUESSING", ("cpu",))
    found, begin = [], engine.Pass.begin

    def seen(self):
        found.append(self.call.n_tokens)
        return begin(self)

    monkeypatch.setattr(engine.Pass, "begin", seen)
    return found


def loss_of(ops):
    return ll.linear_cross_entropy(ops.hidden, ops.head, ops.labels)


def loss_of_ones_own(ops):
    return ll.token_loss(lambda s: 0.1 * s.entropy - s.logprob, ops.hidden, ops.head, ops.labels, want=WANT)


def loss_of_sequences(ops):
    hidden, labels = ops.hidden.view(3, 3, -1), ops.labels.view(3, 3)
    return ll.token_loss(lambda s: -(s.logprob.sum(1) ** 2), hidden, ops.head, labels, per="sequence")


def logprobs_of(ops):
    return ll.token_stats(ops.hidden, ops.head, ops.labels, want=("logprob", "rank")).logprob.sum()


def values_of(ops):
    with torch.no_grad():
        return logprobs_of(ops)


@pytest.mark.parametrize("ignored", [[], [0, 4], list(range(N))], ids=["none", "some", "all"])
@pytest.mark.parametrize("step", [loss_of, loss_of_ones_own, loss_of_sequences, logprobs_of, values_of])
def test_a_guess_changes_no_number(step, ignored, begun, monkeypatch):
    ops = operands((N,), H, V, dtype=torch.float64).training("hidden", "weight", "bias")
    ops.labels[ignored] = -100
    found = step(ops)
    assert begun == ([N] if not ignored else [N, N - len(ignored)])
    monkeypatch.setattr(calls, "GUESSING", ())
    plain = step(ops)
    assert torch.equal(found, plain)
    if found.requires_grad:
        leaves = list(ops.leaves.values())
        for mine, theirs in zip(torch.autograd.grad(found, leaves), torch.autograd.grad(plain, leaves), strict=True):
            assert torch.equal(mine, theirs)


@pytest.mark.parametrize("label", [-1, V, 2**40])
def test_what_does_not_exist_is_read_nowhere(label, begun):
    ops = operands((N,), H, V)
    ops.labels[3] = label
    with pytest.raises(LabelError, match=f"got {label}"):
        loss_of(ops)
    assert begun == [N]


def test_a_callers_rows_are_asked_for_once(begun):
    ops, asked = operands((N,), H, V, dtype=torch.float64), []
    ops.labels[[0, 4]] = -100  # where a guess would be wrong

    def rows(tokens, entries):
        asked.append(tokens)
        return torch.zeros(
            len(range(N)[tokens]) if isinstance(tokens, slice) else len(tokens), entries.stop - entries.start
        )

    ll.token_stats(ops.hidden, ops.head, ops.labels, want=("kl",), reference=rows)
    assert begun == [N, N - 2]
    guessed = len(asked)
    calls.GUESSING = ()
    ll.token_stats(ops.hidden, ops.head, ops.labels, want=("kl",), reference=rows)
    assert len(asked) == 2 * guessed


def test_a_chunk_that_was_prepared_is_not_made_again(begun, monkeypatch):
    made, of = [], Chunk.of

    def seen(call, rows, *others):
        made.append(rows)
        return of(call, rows, *others)

    monkeypatch.setattr(Chunk, "of", seen)
    ops = operands((3, 4), H, V, dtype=torch.float64).training("hidden")
    for per in ("token", "sequence"):
        made.clear()
        ll.token_loss(lambda s: -s.logprob.reshape(len(s.logprob), -1)[:, 0], ops.hidden, ops.head, ops.labels, per=per)
        assert made == [slice(0, 12)]


def test_labels_that_were_changed_since_are_seen(begun):
    ops = operands((N,), H, V, dtype=torch.float64).training("hidden")
    loss = loss_of(ops)
    ops.labels[0] += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
