"""What may lie in the place of a file or a template: every kind of damage that tests of bad inputs go through."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa

DEEP = 100_000
_CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}

# What a message may have in the place of what it says or of who says it, and what is said of it.
MESSAGES: dict[str, tuple[dict[str, Any], str]] = {
    "parts": (
        {"role": "user", "content": [{"type": "text", "text": "a"}]},
        "content must be text, got list; write its",
    ),
    "an object": ({"role": "user", "content": {"a": 1}}, "content must be text, got dict"),
    "a number": ({"role": "user", "content": 3}, "content must be text, got int"),
    "a truth": ({"role": "user", "content": True}, "content must be text, got bool"),
    "null": ({"role": "user", "content": None}, "content must be text, got null"),
    "null without a call": ({"role": "user", "content": None, "tool_calls": []}, "content must be text, got null"),
    "parts with a call": ({"role": "user", "content": ["a"], "tool_calls": [_CALL]}, "content must be text, got list"),
    "no content": ({"role": "user"}, "content must be text, got none"),
    "nobody": ({"role": None, "content": "a"}, "role must be text, got null"),
    "a number's": ({"role": 1, "content": "a"}, "role must be text, got int"),
    "some people's": ({"role": ["user"], "content": "a"}, "role must be text, got list"),
    "no role": ({"content": "a"}, "role must be text, got none"),
}
# What is said where a tool is called, as other formats have it.
CALLS = ({"role": "assistant", "content": None, "tool_calls": [_CALL]}, {"role": "assistant", "tool_calls": [_CALL]})


def not_utf8(count: int) -> pa.Array:
    """A column of text that is none, which parquet files may have."""
    return pa.Array.from_buffers(pa.string(), count, pa.array([b"\xff\xfe a"] * count).buffers())


# Chat templates that fail, never end, or take or write too much; and what is said of them.
TEMPLATES = {
    "a loop": ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "did not end in"),
    "a power": ("{{ 9 ** (9 ** 9) }}", "did not end in"),
    "memory": ("{{ 'a' * 10000000000 }}", "needs more than 256 MiB"),
    "a list": ("{% set x = [0] * 3000000000 %}", "needs more than 256 MiB"),
    "padding": ("{{ 'a'.center(10000000000) }}", "needs more than 256 MiB"),
    "much": ("{{ 'a' * 2000000 }}", "it wrote 2,000,000 characters"),
    "a refusal": ("{{ raise_exception('no') }}", "failed: no"),
    "a gap": ("{{ messages[7].x.y }}", "failed"),
    "syntax": ("{% if %}", "failed"),
    "a filter": ("{{ 1|nothing }}", "failed"),
    "recursion": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "failed"),
    "depth": ("{{ " + "(" * 10_000 + " }}", "failed"),
    "an escape": ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "failed"),
}
MARK = "{% generation %}{% endgeneration %}"  # of a template that itself says what the assistant says


def _put(content: bytes | str) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(content if isinstance(content, bytes) else content.encode())


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


# What may lie in the place of a JSON file of ours.
JSON: dict[str, Callable[[Path], object]] = {
    "empty": _put(""),
    "half": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "deep": _put("[" * DEEP),
    "deep in an object": _put('{"a": ' + "[" * DEEP),
    "bytes": _put(b"\xff\xfe\x00"),
    "digits": _put("9" * 5000),
    "a list": _put("[1]"),
    "a number": _put("5"),
    "null": _put("null"),
    "a folder": _folder,
    "a pipe": _pipe,
}


# A module of reward functions for `logitless align`, and what is said of each: after its name, on one line.
REWARDS = """
import numpy as np, torch
def short(completions, **_): return [1.0]
def none(completions, **_): return None
def text(completions, **_): return "1" * len(completions)
def texts(completions, **_): return ["x"] * len(completions)
def table(completions, **_): return {i: 1.0 for i in range(len(completions))}
def nested(completions, **_): return [[1.0, 2.0]] * len(completions)
def tensors(completions, **_): return [torch.ones(2)] * len(completions)
def huge(completions, **_): return [10**400] * len(completions)
def number(completions, **_): return 1.0
def fails(completions, **_): raise RuntimeError("boom" + chr(10) + "and more")
def column(completions, **given): return [given["answer"] for _ in completions]
def late(completions, **_): yield 1 / 0
def nothing(): return []
def leaves(completions, **_): raise SystemExit(5)
def nan(completions, **_): return [float("nan")] * len(completions)
def infinite(completions, **_): return np.full(len(completions), np.inf)
async def later_nan(completions, **_): return [float("nan")] * len(completions)
async def later_short(completions, **_): return []
async def later_fails(completions, **_): raise RuntimeError("boom")
async def later_leaves(completions, **_): raise SystemExit(5)
def nobody(completions, **_): return [None] * len(completions)
def unordered(completions, **_): return set(range(len(completions)))
def octets(completions, **_): return b"1" * len(completions)
def endless(completions, **_):
    while True: yield 1.0
def beyond(completions, **_): return [-1e308] * len(completions)
def closes(completions, **_): raise GeneratorExit
class Strange(BaseException): pass
def strange(completions, **_): raise Strange("odd")
async def later_strange(completions, **_): raise Strange("odd")
class Kind: pass
class Later:
    async def __call__(self, completions, **_): return [float("nan")] * len(completions)
later_object = Later()
"""
REWARDS_SAY = {
    "short": "a number, or None for no reward, for each of 4 completions, got 1 value",
    "none": "got NoneType",
    "text": "got str",
    "texts": "got str among them",
    "table": "got dict",
    "nested": "got list among them",
    "tensors": "got Tensor among them",
    "huge": "got int among them",
    "number": "got float",
    "fails": "RuntimeError: boom and more (my_rewards.py:12); it is called with prompts, completions, completion_ids",
    "column": "KeyError: 'answer' (my_rewards.py:13)",
    "late": "ZeroDivisionError: division by zero (my_rewards.py:14)",
    "nothing": "TypeError: nothing() got an unexpected keyword argument",
    "leaves": "SystemExit: 5 (my_rewards.py:16)",
    "nan": "returned nan: expected a finite number",
    "infinite": "returned inf: expected a finite number",
    "later_nan": "returned nan: expected a finite number",
    "later_short": "got 0 values",
    "later_fails": "RuntimeError: boom (my_rewards.py:21)",
    "later_leaves": "SystemExit: 5 (my_rewards.py:22)",
    "unordered": "got set",
    "octets": "got bytes",
    "endless": "got more than 4 values",
    "beyond": "returned -1e+308: expected a finite number in float32",
    "closes": "GeneratorExit:  (my_rewards.py:29)",
    "strange": "Strange: odd (my_rewards.py:31)",
    "later_strange": "Strange: odd (my_rewards.py:32)",
    "Kind": "TypeError: Kind() takes no arguments",
    "later_object": "returned nan: expected a finite number",
}
