"""Shortcuts through Triton's interpreter, which spends most of a small kernel's time on what it has done before."""

from typing import Any

import numpy
from triton import language as tl
from triton.runtime import interpreter

from logitless.vocab.backends.triton import plain_kernels

_prepare, _reduce = interpreter._patch_lang, interpreter.ReduceOps.apply_impl


def _prepare_once(kernel: Any) -> Any:
    """Triton's functions as numpy's, for a kernel and what it calls: a launch does it, and it lasts that long."""
    modules = [x for x in kernel.__globals__.values() if x is tl or x is tl.core]
    if modules and not any(tl.core.is_builtin(module.load) for module in modules):
        return interpreter._LangPatchScope()
    return _prepare(kernel)


def _reduce_at_once(reduction: Any, given: Any) -> Any:
    """The maximum of a block with its NaN, as numpy takes it: without, it is a Python call an entry."""
    if reduction.combine_fn is not plain_kernels.larger:
        return _reduce(reduction, given)
    return reduction.min_max(given[0], val_reduce_op=numpy.max)


def hasten() -> None:
    """Take the shortcuts, in this process and from now on."""
    interpreter._patch_lang, interpreter.ReduceOps.apply_impl = _prepare_once, _reduce_at_once
