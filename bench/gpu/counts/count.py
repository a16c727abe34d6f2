"""A call's counts and its predicted time, as records of a result file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from bench.gpu.counts.calls import Call
from bench.gpu.counts.claimed import claimed
from bench.gpu.counts.kernels import Counted, Launch, compiled
from bench.gpu.counts.machine import Machine, shared_bytes, traffic
from bench.gpu.counts.recording import Event, Operator, Product, Recording, Wait

IGNORED = 3  # tokens without a label in the calls that go before a capture: another number of tokens than in it
OTHER_ROWS = ((64, 1), (64, 2), (64, 3), (63, 62))  # tokens of the call that goes before, and of the one in a graph
Record = dict[str, Any]


@dataclass
class Seen:
    """The kernels of all calls, each compiled once for the device that is claimed."""

    kernels: dict[str, Counted] = field(default_factory=dict)
    calls: dict[str, list[str]] = field(default_factory=dict)  # key -> names of the calls that launch it

    def add(self, call: str, recording: Recording) -> None:
        for launch in recording.of(Launch):
            if launch.key not in self.kernels:
                self.kernels[launch.key] = compiled(launch)
            names = self.calls.setdefault(launch.key, [])
            if call not in names:
                names.append(call)

    def records(self, capability: int) -> list[Record]:
        """One for each compiled kernel."""
        return [
            {"kind": "gpu-kernel", "capability": capability, "calls": self.calls[key], **kernel.record()}
            for key, kernel in self.kernels.items()
        ]


def recorded(call: Call, recording: Recording) -> list[Event]:
    """The events of one step of the call, once everything that happens but once has happened."""
    step, recording.known = call.build(), call.known
    for _ in range(2):
        recording.events.clear()
        step()
    return list(recording.events)


def captured(call: Call, recording: Recording) -> tuple[list[Event], list[str]]:
    """The events of a CUDA graph of the step, and the kernels that it would have to compile.

    That is after steps with some tokens ignored.
    """
    step = call.build()
    recording.ignored = IGNORED
    try:
        return _captured(step, step, recording)
    finally:
        recording.ignored = 0


def late_with_rows(call: Call, recording: Recording) -> Record | None:
    """The kernels that a CUDA graph would have to compile after steps with other numbers of tokens."""
    if call.with_rows is None:
        return None
    steps = {n: call.with_rows(n) for n in {n for pair in OTHER_ROWS for n in pair}}
    return {f"{n} after {m}": _captured(steps[m], steps[n], recording)[1] for m, n in OTHER_ROWS}


def _captured(
    before: Callable[[], Any], step: Callable[[], Any], recording: Recording
) -> tuple[list[Event], list[str]]:
    """A graph's events, and those of its kernels that the step before it does not launch."""
    recording.events.clear()
    before()
    known = {launch.key for launch in recording.of(Launch)}
    recording.events.clear()
    recording.ignored, recording.capturing = 0, True
    try:
        step()
    finally:
        recording.capturing = False
    late = [launch.name for launch in recording.of(Launch) if launch.key not in known]
    return list(recording.events), late


def counted(call: Call, machine: Machine, seen: Seen, capability: int = 90) -> Record:
    """Everything that is known of a call."""
    with claimed(capability, machine.name, machine.gib, machine.processors) as recording:
        graph, late = captured(call, recording) if call.capture else (None, None)
        if graph is not None:
            seen.add(call.name, recording)
        late_rows = late_with_rows(call, recording)
        recording.events = recorded(call, recording)
        seen.add(call.name, recording)
        events = list(recording.events)
        bare = {name: _floor(build(), recording, machine) for name, build in call.bare.items()}
        recording.events = events
        before = recording.waits_before_products
        said = call.explained() if call.explained else None
    return {
        "kind": "gpu-count", "call": call.name, "title": call.title, "shape": call.shape, "goal": call.goal,
        "rival": call.rival,
        "launches": recording.launches,
        "kernels": Counter(x.name for x in recording.of(Launch)),
        "operators": Counter(x.name for x in recording.of(Operator)),
        "waits": [x.what for x in recording.of(Wait)], "waits_before_products": before,
        "explained": said,
        "specialisations": len({x.key for x in recording.of(Launch)}),
        "first_in_capture": late, "first_with_rows": late_rows,
        "converted_mb": sum(x.nbytes for x in recording.of(Operator) if x.converts) / 1e6,
        "products": [_product(p, many, machine) for p, many in Counter(recording.of(Product)).items()],
        "bytes": _bytes(events, machine), "seconds": _seconds(events, machine, seen.kernels),
        "bare": min(bare, key=bare.__getitem__, default=None), "bare_seconds": min(bare.values(), default=None),
        "floors": bare,
        "graph": None if graph is None else _in_graph(graph, machine, seen.kernels), "replayed": call.replayed,
    }  # fmt: skip


def _floor(step: Callable[[], Any], recording: Recording, machine: Machine) -> float:
    """Predicted seconds of a floor, in which there is no kernel of ours."""
    recording.events = []
    step()
    return sum(machine.seconds(event, {}) for event in recording.events)


def _product(p: Product, many: int, machine: Machine) -> Record:
    tiles, waves, _ = machine.tiling(p)
    return {
        "shape": [p.rows, p.columns, p.depth], "adds": p.adds, "many": many, "tiles": tiles, "waves": waves,
        "full": tiles / (waves * machine.processors), "seconds": machine.product(p),
    }  # fmt: skip


def _bytes(events: list[Event], machine: Machine) -> Record:
    """Bytes from and to memory by who moves them, and what the products' tiles read through the cache."""
    products = [x for x in events if isinstance(x, Product)]
    return {
        "products": sum(x.nbytes for x in products),
        "kernels": sum(traffic(x)[1] for x in events if isinstance(x, Launch)),
        "operators": sum(x.nbytes for x in events if isinstance(x, Operator)),
        "through the cache": sum(shared_bytes(x, machine) for x in events),
    }


def _in_graph(events: list[Event], machine: Machine, kernels: dict[str, Counted]) -> Record:
    """Launches, waits, of which there must be none, and predicted seconds of a CUDA graph."""
    waits = [x.what for x in events if isinstance(x, Wait)]
    return {
        "launches": len(events) - len(waits),
        "waits": waits,
        "seconds": _seconds(events, machine.in_graph(), kernels)["all"],
    }


def _seconds(events: list[Event], machine: Machine, kernels: dict[str, Counted]) -> Record:
    """Predicted, by who takes them; small: what takes no longer than its launch."""
    out: dict[str, float] = dict.fromkeys(("products", "kernels", "operators", "small", "waits"), 0.0)
    names: dict[type, str] = {Product: "products", Launch: "kernels", Operator: "operators", Wait: "waits"}
    for event in events:
        seconds = machine.seconds(event, kernels)
        small = seconds <= machine.launch and not isinstance(event, Wait)
        out["small" if small else names[type(event)]] += seconds
    return out | {"all": sum(out.values())}
