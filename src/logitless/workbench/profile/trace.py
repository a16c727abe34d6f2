"""`trace`: what a step of any model allocates, stage by stage, for real or on fake tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ...errors import OptionError
from .fakes import GPU, Fakes, faked, is_meta
from .labels import Labels, short
from .lint import Finding
from .recording import Peak, Recording
from .storages import Tracker, resizes_told


class Meter(Protocol):
    """Measures beside the tracker."""

    def read(self) -> tuple[int, int]:
        """(bytes now, the most since the last reading)."""
        ...


def trace(
    model: nn.Module,
    *,
    device: str = "gpu",
    batch: tuple[int, int] | None = None,
    meter: Meter | None = None,
) -> Trace:
    """Records what runs inside the `with` block: forward, loss, backward, optimizer step, of your own model and step.

        with torch.device("meta"):
            model = Model(config)
        with trace(model) as t:
            loss = model(torch.zeros(1, 4096, dtype=torch.long, device=t.device)).sum()
            loss.backward()
        print(t.table())

    A model built on the meta device is traced on fake tensors, without memory: `device` "gpu" as a GPU would run it
    (fused attention, tensors made on the host are findings), "cpu" as a CPU would. Any other model runs for real.
    batch: (rows, tokens) of labels of which the last of each row has no target, for the logitless loss on fake
    tensors. meter: read at the end of each stage. Sizes are rounded up to 512 bytes, as a GPU's allocator does.
    Raises OptionError for an unknown device, ConfigError where a fake model's work depends on its data.
    """
    if device not in ("gpu", "cpu"):
        raise OptionError(f"device: expected 'gpu' or 'cpu', got {device!r}")
    return Trace(model, GPU if device == "gpu" else "cpu", batch or (0, 0), meter)


class Trace:
    """What `trace` returns; its results are there when the block has ended."""

    def __init__(self, model: nn.Module, device: str, batch: tuple[int, int], meter: Meter | None) -> None:
        self.model, self.meter = model, meter
        self.fake = is_meta(model)
        self._kind, self._batch = device, batch
        self._phase = ""
        self._early: set[torch.optim.Optimizer] = set()
        self._embedding, self._layer, self._body = landmarks(model)
        self.readings: list[tuple[int, int]] = []
        self._marks: list[tuple[str, int]] = []
        self._recording: Recording | None = None

    @property
    def device(self) -> torch.device:
        """Where the step's tensors belong. Raises OptionError for a model that lies nowhere."""
        found = next(chain(self.model.parameters(), self.model.buffers()), None)
        if found is None:
            kind = type(self.model).__name__
            raise OptionError(f"device: expected a model with parameters or buffers, got {kind} without; say where")
        return found.device

    def __enter__(self) -> Trace:
        with ExitStack() as stack:
            rows, _ = self._batch  # the last label of each row has no loss
            if self.fake:
                stack.enter_context(faked(self.model, self._kind, ignored=rows))
            self._labels = Labels(self.model, self._on_module)
            stack.callback(self._labels.remove)
            self._fakes = Fakes(self._kind, self._labels) if self.fake else None
            run = None if self._fakes is None else self._fakes.run
            there = self._kind if self.fake else None
            self._tracker = Tracker(self._here, run, head_shape(self.model), there)
            stack.callback(register_optimizer_step_pre_hook(self._before_step).remove)
            stack.callback(register_optimizer_step_post_hook(self._after_step).remove)
            self._count_model()
            stack.enter_context(resizes_told(self._tracker))
            stack.enter_context(self._tracker)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if error is None:
            if self._labels.root == "loss":
                self._close("loss")
            elif any(x.born > self._marks[-1][1] for x in self._tracker.allocations[-1:]):
                self._close("end")
        self._stack.__exit__(kind, error, traceback)
        findings = () if self._fakes is None else tuple(self._fakes.lint.findings.values())
        tracker = self._tracker
        curve = tracker.curve[: self._marks[-1][1] + 1]
        self._recording = Recording(tracker.allocations, curve, self._marks, findings, tracker.most_elsewhere)

    @property
    def recording(self) -> Recording:
        """The finished recording."""
        if self._recording is None:
            raise OptionError("trace: expected its block to have ended; read results after the with statement")
        return self._recording

    @property
    def peak(self) -> Peak:
        """The peak, with the operator and the module that set it."""
        return self.recording.peak

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Device lint: tensors made on another device than the model's."""
        return self.recording.findings

    def table(self) -> str:
        """Stages, peak, categories and the largest tensors, as text."""
        from .recording_tables import as_text

        return as_text(self.recording)

    def plot(self, path: str | Path) -> None:
        """The timeline into a PNG. Raises OptionError where nothing ran."""
        from .timeline import draw

        if len(self.recording.marks) == 1:  # of the parameters
            raise OptionError("trace: expected a step within its block to plot, got none")
        draw({"this step": self.recording}, Path(path), type(self.model).__name__)

    def as_json(self) -> dict[str, Any]:
        """The recording for machines; `schema` changes when a key changes its meaning."""
        return {"schema": 1, **self.recording.as_json()}

    def _count_model(self) -> None:
        for name, x in self.model.named_parameters():
            self._tracker.know(x, "parameters", short(name))
            if x.grad is not None:
                self._tracker.know(x.grad, "gradients", short(name))
        for name, x in self.model.named_buffers():
            self._tracker.know(x, "parameters", short(name))
        self._close("parameters")

    def _close(self, stage: str) -> None:
        self._marks.append((stage, self._tracker.now))
        if self.meter is not None:
            self.readings.append(self.meter.read())

    def _here(self) -> tuple[str, str]:
        place = self._labels.here()
        if self._labels.backward and self._phase != "backward":
            self._close("loss")
            self._phase = "backward"
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)
        return place

    def _end_backward(self) -> None:
        self._phase = ""
        tracker, model = self._tracker, self.model
        gradients = [(name, p.grad) for name, p in model.named_parameters() if p.grad is not None]
        if not self._labels.accumulated and all(tracker.category(g) == "gradients" for _, g in gradients):
            self._marks.pop()  # a gradient inside the loss: no stage of the step
            del self.readings[len(self._marks) :]
            return
        self._labels.accumulated = False
        for name, gradient in gradients:
            tracker.name(gradient, "gradients", short(name))
        self._close("backward")
        self._labels.run_in("model")

    def _on_module(self, module: str, entered: bool) -> None:
        if entered:
            if self._early and self._name_state(*self._early):
                self._close("optimizer state")
            self._early.clear()
            if module == self._embedding and self._labels.root != "model":
                self._labels.run_in("model")
        elif module == self._embedding:
            self._close("after embedding")
        elif module == self._layer:
            self._close("after first layer")
        elif module == self._body and self._labels.root == "model":
            self._close("after full forward")
            self._labels.run_in("loss")

    def _before_step(self, *_: Any) -> None:
        self._labels.run_in("optimizer")

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._labels.run_in("model")
        if len(self._marks) == 1:  # no forward pass yet: it makes the state that later steps find
            self._early.add(optimizer)
        else:
            self._name_state(optimizer)
            self._close("optimizer")

    def _name_state(self, *optimizers: torch.optim.Optimizer) -> bool:
        """Whether the optimizers have a state."""
        states = [state for optimizer in optimizers for state in optimizer.state.values()]
        found = [x for state in states for x in state.values() if isinstance(x, torch.Tensor)]
        for x in found:
            self._tracker.name(x, "optimizer state")
        return bool(found)


def landmarks(model: nn.Module) -> tuple[str | None, str | None, str]:
    """The names of the embedding, the first layer, and the body, which holds the layers.

    The layers are the longest list of modules, of a transformers model the longest of its decoder.
    """
    names = {id(module): short(name) for name, module in model.named_modules()}
    find = getattr(model, "get_input_embeddings", None)
    embedding = find() if find else next((m for m in model.modules() if isinstance(m, nn.Embedding)), None)
    find = getattr(model, "get_decoder", None)
    decoder = find() if find else None  # of some models the head, or nothing
    within = _lists(decoder) if isinstance(decoder, nn.Module) else ()
    layers = max(within, key=len, default=None) or max(_lists(model), key=len, default=None)
    if layers is None:
        return names.get(id(embedding)), None, ""
    return names.get(id(embedding)), names[id(layers[0])], names[id(layers)].rpartition(".")[0]


def _lists(module: nn.Module) -> Iterator[nn.ModuleList]:
    """The lists of modules within one, but not those within another list, such as a layer's experts."""
    for child in module.children():
        if isinstance(child, nn.ModuleList) and len(child) and not _wraps(child):
            yield child
        else:
            yield from _lists(child)


def _wraps(modules: nn.ModuleList) -> bool:
    """Whether a list holds one whole body, not a layer: all its Linear layers lie in lists of modules within it."""
    inside = {m for each in _lists(modules[0]) for m in each.modules()} if len(modules) == 1 else set()
    return bool(inside) and all(m in inside for m in modules.modules() if isinstance(m, nn.Linear))


def head_shape(model: nn.Module) -> tuple[int, ...]:
    """The shape of the output head's weight, () where the model does not say."""
    find = getattr(model, "get_output_embeddings", None)
    weight = getattr(find() if find else None, "weight", None)
    return () if weight is None else tuple(weight.shape)
