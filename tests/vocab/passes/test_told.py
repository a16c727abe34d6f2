"""What passes tell the logger `logitless`."""

import logging

import pytest
import torch

import logitless as ll
from logitless.vocab.passes import told
from tests.support.vocab.comparing import operands
from tests.support.vocab.processors import needs_a_compiler


@pytest.fixture(autouse=True)
def nothing_told(monkeypatch):
    monkeypatch.setattr(told, "_told", set())


@needs_a_compiler
@torch.no_grad()
def test_each_kind_of_call_is_told_once_with_its_price_and_backend(caplog):
    ops = operands((40,), 8, 300, dtype=torch.float32)
    caplog.set_level(logging.INFO, "logitless")
    for _ in range(2):
        ll.token_stats(ops.hidden, ops.head, ops.labels, want=("logprob", "entropy"))
        ll.token_stats(ops.hidden, ops.head, ops.labels, want=("logprob",), backend="compiled")
        ll.sample_tokens(ops.hidden, ops.head)
    said = [record.getMessage() for record in caplog.records if record.name == "logitless"]
    explained = ll.explain(ops.hidden, ops.head, ops.labels, want=("logprob", "entropy"))
    assert said[0] == f"logprob, entropy: 1 GEMM (values), backend eager ({explained.passed_over})"
    assert said[1] == "logprob: 1 GEMM (values), backend compiled"
    assert said[2].startswith("logsumexp, entropy")
    assert len(said) == 3


def test_nothing_is_told_where_nobody_listens():
    ops = operands((6,), 8, 300, dtype=torch.float32)
    ll.token_stats(ops.hidden, ops.head, ops.labels, want=("logprob",))
    assert not told._told
