"""Every statistic and its gradients, for every shape and option of a call, against the oracle."""

from dataclasses import replace

import torch

from logitless.algebra.stats import STATISTICS
from tests.support.plain import halved, over
from tests.support.vocab.comparing import ALONE, EVERYTHING, FIXED, PAIRED, all_at_once, operands
from tests.support.vocab.triton_calls import check

DTYPES = {"fp64": torch.float64, "fp32": torch.float32}


@halved
@over("dtype", DTYPES)
@over("name", EVERYTHING + FIXED)
def test_each_statistic(name, dtype, device):
    ops = operands((13,), 7, 1031, dtype=dtype, reference=name in PAIRED)
    check(device, ops, (name,), memory_budget=100_000 if dtype == torch.float64 else 200_000)


@over(
    "dtype_budget",
    {  # whole rows, slices of some and of all tokens that do not divide V
        "whole rows": (torch.float32, None),
        "small slices": (torch.float32, 40_000),
        "large slices": (torch.float32, 200_000),
        "fp64": (torch.float64, 100_000),
    },
)
def test_all_at_once(dtype_budget, device):
    ops, options = all_at_once(*dtype_budget)
    check(device, ops, EVERYTHING, **options)


@over(
    "head",
    {
        "scale": {"scale": 0.3},
        "softcap": {"softcap": 4.0},
        "both, padded rows": {"scale": 0.6, "softcap": 3.0, "vocab_size": 1030},
        "no bias, padded rows": {"bias": False, "vocab_size": 997},
    },
)
def test_head_transforms_in_slices(head, device):
    ops = operands((6,), 7, 1031, reference=True, **head)
    check(device, ops, EVERYTHING, top_k=4, temperature=1.6, memory_budget=70_000)


def test_head_transforms_of_whole_rows(device):
    ops = operands((6,), 7, 1031, reference=True, softcap=4.0, scale=1.7)
    check(device, ops, EVERYTHING, top_k=4, temperature=1.6)


@over("budget", [None, 20_000])
def test_no_labels(budget, device):
    want = tuple(name for name in EVERYTHING if not STATISTICS[name].needs_label)
    ops = replace(operands((6,), 7, 517, reference=True), labels=None)
    check(device, ops, want, top_k=2, memory_budget=budget)


def test_adapters_on_the_head(device):
    ops = operands((9,), 7, 523, reference=True, ranks=(2, 3))
    check(device, ops, ("logprob", "entropy", "kl"), memory_budget=30_000)


def test_adapters_alone_are_trained(device):
    ops = operands((9,), 7, 523, ranks=(2,), scale=0.5).training("a", "b")
    check(device, ops, ("logprob", "entropy"), temperature=0.7)


@over("shape", [(1, 1, 1), (1, 1, 2), (17, 33, 129), (65, 3, 257), (2, 130, 5)])
def test_ragged_sizes(shape, device):
    n, h, v = shape
    check(device, operands((n,), h, v, reference=True), EVERYTHING, top_k=min(v, 4))


def test_no_token(device):
    check(device, operands((0,)), ALONE, top_k=2)


def test_ignored_tokens_alone(device):
    ops = operands((4,))
    ops.labels[:] = -100
    check(device, ops, ALONE, top_k=2)


def test_a_temperature_for_each_token(device):
    ops = operands((3, 5), reference=True)
    ops.labels[1, 2] = -100
    check(device, ops, EVERYTHING, temperature=torch.rand(3, 5) + 0.5, top_k=2)
