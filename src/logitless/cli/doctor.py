"""`logitless doctor`."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from ..units import format_bytes, one_unit, plural
from ..versions import versions
from ..workbench.common.files import check_outputs
from ..workbench.common.options import Count, Device, JsonFile, MemoryBudget, budget_bytes_on, check_values
from . import options
from .output import deliver

if TYPE_CHECKING:
    import torch
    from rich.console import Console

DESCRIPTION = """What this machine has, which backends can run on it, and what typical calls would cost.

Computes nothing: prices and slices are those that the calls themselves would get."""
PACKAGES = (
    "torch",
    "triton",
    "transformers",
    "trl",
    "peft",
    "accelerate",
    "jax",
    "liger-kernel",
    "cut-cross-entropy",
    "quack-kernels",
)
# name: statistics, what is trained, whether the loss is known in the forward pass, whether there is a reference
CALLS: dict[str, tuple[tuple[str, ...], tuple[str, ...], bool, bool]] = {
    "cross-entropy, trainable head": (("logprob",), ("hidden", "weight"), True, False),
    "cross-entropy, frozen head": (("logprob",), ("hidden",), True, False),
    "log-prob + entropy, values": (("logprob", "entropy"), (), False, False),
    "log-prob, any upstream, frozen head": (("logprob",), ("hidden",), False, False),
    "log-prob, any upstream, trainable head": (("logprob",), ("hidden", "weight"), False, False),
    "PPO + entropy + KL, trainable head": (("logprob", "entropy", "kl"), ("hidden", "weight"), True, True),
}


@dataclass(frozen=True)
class DoctorConfig:
    """Options of `logitless doctor`."""

    tokens: Count = 8192
    """Of the typical calls."""
    hidden_size: Count = 4096
    """Of the typical calls."""
    vocab_size: Count = 151_936
    """Of the typical calls."""
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Of the typical calls' hidden states and head."""
    memory_budget: MemoryBudget = "auto"
    device: Device = "auto"
    json: JsonFile = None

    def check(self) -> DoctorConfig:
        """Itself; OptionError for a size that means nothing."""
        check_values(self)
        check_outputs({"json": self.json})
        return self


def main(arguments: Sequence[str]) -> int:
    """Looks, shows, writes; 0 whatever it finds."""
    config = options.parse(DoctorConfig, prog="logitless doctor", description=DESCRIPTION, arguments=arguments).check()
    import torch  # below, so that --help needs no torch

    from ..workbench.common.device import device_of

    where = device_of(config.device)
    found = {
        "schema": 1,
        "python": platform.python_version(),
        "versions": versions(*PACKAGES),
        "torch_built_for": torch.version.cuda and f"CUDA {torch.version.cuda}",
        "devices": list(_devices()),
        "backends": list(_backends()),
        "calls": list(_calls(config, where, budget_bytes_on(config.device, config.memory_budget))),
    }
    deliver(found, config.json, lambda console: show(found, config, where, console))
    return 0


def _devices() -> Iterator[dict[str, Any]]:
    import torch

    name = platform.processor() or platform.machine()
    yield {"device": "cpu", "name": name, "threads": torch.get_num_threads(), "bytes": None, "capability": None}
    for i in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(i)
        capability = f"{p.major}.{p.minor}"
        yield {
            "device": f"cuda:{i}",
            "name": p.name,
            "threads": None,
            "bytes": p.total_memory,
            "capability": capability,
        }


def _backends() -> Iterator[dict[str, Any]]:
    import torch

    from ..vocab.face import CANDIDATES

    for device in ("cpu", *(["cuda"] if torch.cuda.is_available() else [])):
        for name, backend in CANDIDATES.items():
            reason = backend.why_not(device)
            yield {"backend": name, "device": device, "runs": reason is None, "reason": reason}


def _calls(config: DoctorConfig, where: torch.device, budget: int) -> Iterator[dict[str, Any]]:
    import torch

    import logitless as ll

    dtype = getattr(torch, config.dtype)

    n, h, v = config.tokens, config.hidden_size, config.vocab_size
    row = torch.empty(h, dtype=dtype, device=where)  # whose numbers lie side by side as a real tensor's do

    def shape(*sizes: int) -> torch.Tensor:
        """A tensor of this shape in the memory of one row, which nobody reads."""
        return row.expand(sizes)

    labels = torch.zeros(1, dtype=torch.long, device=where).expand(n)
    for name, (want, trained, loss, against) in CALLS.items():
        x = {"hidden": shape(n, h), "weight": shape(v, h)}
        for part in trained:
            x[part].requires_grad_()
        reference = (shape(n, h), ll.LMHead(shape(v, h))) if against else None
        said = ll.explain(
            x["hidden"], ll.LMHead(x["weight"]), labels, loss=loss, want=want, reference=reference, memory_budget=budget
        )
        yield {
            "call": name,
            "backend": said.backend,
            "gemms": said.price.gemms,
            "method": said.price.method,
            "tflop": said.flop / 1e12,
            "slice_tokens": said.slices.tokens,
            "slice_entries": said.slices.width,
            "logits_held": said.slices.stored or not said.slices.in_products,
            "buffer_bytes": said.buffer_bytes,
            "saved_bytes": said.saved_bytes,
            "gradient_bytes": said.gradient_bytes,
            "dense_bytes": said.dense_bytes,
        }


def show(found: dict[str, Any], config: DoctorConfig, where: torch.device, console: Console) -> None:
    """Versions, what can run where, what typical calls would get."""
    from ..workbench.common.tables import columns

    have = [f"{name} {number}" for name, number in found["versions"].items() if number]
    console.print(f"Python {found['python']}, {', '.join(have)}", highlight=False)
    table = columns("<device", "<name", "<memory", "<backend", "<")
    for d in found["devices"]:
        size = "" if d["bytes"] is None else format_bytes(d["bytes"])
        for b in found["backends"]:
            if b["device"] == d["device"].partition(":")[0]:
                table.add_row(d["device"], d["name"], size, b["backend"], "runs" if b["runs"] else b["reason"])
    console.print(table, highlight=False)
    backends = " and ".join(dict.fromkeys(c["backend"] for c in found["calls"]))
    console.print(
        f"{plural(config.tokens, 'token')}, hidden {config.hidden_size:,}, vocabulary {config.vocab_size:,}, "
        f"{config.dtype}, on {where} by {backends}",
        highlight=False,
    )
    table = columns("<call", ">GEMMs", ">slices", ">workspace", ">gradients", ">dense")
    table.columns[0].min_width = 22
    calls = [(c, (c["buffer_bytes"] + c["saved_bytes"], c["gradient_bytes"], c["dense_bytes"])) for c in found["calls"]]
    size = one_unit(nbytes for _, sizes in calls for nbytes in sizes)
    for c, sizes in calls:
        slices = f"{c['slice_tokens']:,} × {c['slice_entries']:,}" if c["logits_held"] else "none"
        table.add_row(c["call"], str(c["gemms"]), slices, *map(size, sizes))
    console.print(table, highlight=False)
