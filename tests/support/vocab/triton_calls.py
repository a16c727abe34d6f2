"""Calls of the Triton backend on any device: against the oracle, with other launch sizes, as in a CUDA graph.

What these need of the pass's own modules is named here and in no test.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from typing import Any, TypeVar
from unittest.mock import patch

import torch
from torch import Tensor

import logitless as ll
from logitless.algebra.costs import Price
from logitless.sample import tokens, triton_draw
from logitless.sample.record import SampleRecord
from logitless.vocab.backends import logits
from logitless.vocab.backends.eager import backend as eager_backend
from logitless.vocab.backends.triton import backend, slices, tuned, weights
from logitless.vocab.backends.triton import rows as triton_rows
from logitless.vocab.call import call, validate
from logitless.vocab.passes.engine import Pass
from tests.support.vocab.comparing import Operands, compare
from tests.support.vocab.triton_seen import NoWaiting

product, add_product = logits.product, logits.add_product
Result = TypeVar("Result")


def check(device: str, ops: Operands, want: tuple[str, ...] = ("logprob",), **options: Any) -> None:
    """`compare` on the device with this backend."""
    there = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in options.items()}
    compare(ops.on(device), want, backend="triton", **there)


def drawn(ops: Operands, by: str = "triton", **options: Any) -> SampleRecord:
    """What `sample_tokens` draws with this backend, whichever would be chosen."""
    with patch.object(validate, "choose", lambda name, device, logits, want: by):
        return ll.sample_tokens(ops.hidden, ops.head, **options)


def whole_rows(ops: Operands, **options: Any) -> Iterator[tuple[slice, Any, Tensor]]:
    """For each chunk of tokens these, what is known of them, and their logits, as `sample_tokens` keeps them."""
    given = validate.flatten(ops.hidden, ops.head, None, want=("logsumexp",), **options)
    run = Pass(replace(given, options=replace(given.options, backend="triton")), Price("values", 1, materialised=True))
    with torch.no_grad():
        for rows, chunk in run.chunks():
            found = run.accumulate(chunk, keep="logits")
            yield rows, found, torch.cat([tile.z for tile in chunk.materialised], 1)


@contextmanager
def sizes(device: str, **changes: Any) -> Iterator[None]:
    """Other launch sizes than this device's: of a kernel as a dict, which is merged with its own."""
    table = copy.deepcopy(tuned.table_for(torch.device(device)))
    for name, change in changes.items():
        table[name] = table[name] | change if isinstance(change, dict) else change
    with patch.object(backend, "table_for", lambda _: table), patch.object(weights, "table_for", lambda _: table):
        yield


def one_kernel(device: str) -> AbstractContextManager[None]:
    """Products and accumulation in one kernel, from the first token on, in blocks that divide nothing."""
    gemm = {"rows": 16, "entries": 32, "inner": 16, "group": 3, "least_tokens": 1, "most_tokens": 100}
    return sizes(device, gemm=gemm)


@contextmanager
def no_kernel_for_slices() -> Iterator[None]:
    """The kernels that read products from memory are not there."""
    with ExitStack() as stack:
        stack.enter_context(plain_kernel_alone())
        for name in ("accumulate_plain_slice", "weigh_plain_slice"):
            stack.enter_context(patch.object(backend.plainly, name, None))
        yield


def plain_kernel_alone() -> AbstractContextManager[Any]:
    """Of the kernels that read products from memory only those for plain heads are there."""
    return patch.object(backend.accumulating, "accumulate_slice", None)


def slices_in(place: Callable[[str, int], Tensor]) -> AbstractContextManager[Any]:
    """Slices lie where `place(name, width)` says."""
    return patch.object(slices, "buffer", lambda chunk, name, width: place(name, width))


@contextmanager
def slice_names() -> Iterator[list[str]]:
    """The names of the slices' buffers, as they are used."""
    names: list[str] = []
    slice_of = slices.slice_of

    def named(chunk: Any, v: slice, w: tuple, name: str) -> Any:
        names.append(name)
        return slice_of(chunk, v, w, name)

    with patch.object(slices, "slice_of", named):
        yield names


def blocks_of_rows(count: int) -> AbstractContextManager[Any]:
    """So many entries in a block of the kernels that read a few rows."""
    return patch.object(triton_rows, "BLOCK", {"cpu": count, "cuda": count})


@contextmanager
def half_products(device: str) -> Iterator[None]:
    """On a CPU the products of bf16 operands with fp32 results are emulated, so that the same code runs."""

    def mm(a: Tensor, b: Tensor, out: Tensor) -> Tensor:
        return out.copy_(a.float() @ b.float())

    def addmm(a: Tensor, b: Tensor, out: Tensor) -> Tensor:
        return out.add_(a.float() @ b.float())

    with ExitStack() as stack:
        if device == "cpu":
            stack.enter_context(patch.object(logits, "has_out_dtype", lambda _: True))
            for module in (logits, slices, backend, weights, eager_backend):
                stack.enter_context(patch.object(module, "add_product", addmm))
            for module in (logits, slices, backend, weights):
                stack.enter_context(patch.object(module, "product", mm))
        yield


def captured(device: str, step: Callable[[], Result]) -> Result:
    """The step's result from a replayed CUDA graph; on a CPU, what would wait for the device is refused."""
    if device == "cpu":
        with ExitStack() as stack:
            for module in (call, validate, tokens, triton_draw):
                stack.enter_context(patch.object(module, "capturing", lambda _: True))
            stack.enter_context(NoWaiting())
            return step()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # compiles kernels and loads libraries, which no graph may hold
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    graph.replay()
    return found
