"""The steps of alignment through soft tokens: gradients, clipping, metrics, checkpoints."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from itertools import cycle, islice
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

import torch
from rich.console import Console

from ...models.positions import reach
from ...relax import anneal
from ...resident import peak_bytes
from ..common.files import append_line, write_lines, write_whole
from ..common.say import say
from ..common.written import METRICS_FILE
from ..runs import checkpoints
from ..runs.callbacks import GentleStop
from ..runs.checkpoints import checkpoint_at, finish_checkpoint, last_checkpoint, mark, records_at
from ..runs.progress import Bar
from ..runs.trackers import Send
from ..sources.tokenizer import TextTokenizer
from .config import GradeConfig
from .data import Prompts, batch_of
from .method import Batch, Method, Task, evaluate, gradient_variance, memory_bytes
from .models import finite_norm

CHECKPOINTS_PER_RUN = 4  # even, so that one, with its look at the validation prompts, is half-way
STATE_FILE = "grade.pt"
EVALUATION_BATCH = 32
VARIANCE_BATCH = 4  # prompts whose gradient's variance is measured
LARGE = 100  # times the norm that gradients are clipped to: worth a line
SHORT = {"validation": "val"}  # splits in the names of metrics


@dataclass(eq=False)
class Run:
    """A run's place, parts and state."""

    config: GradeConfig
    place: Path
    method: Method
    tokenizer: TextTokenizer
    prompts: Prompts
    optimizer: torch.optim.Optimizer
    console: Console
    step: int = 0
    records: list[dict[str, Any]] = field(default_factory=list)  # the lines of metrics.jsonl
    norms: list[float] = field(default_factory=list)  # of this step's gradients, before they were clipped
    warned: bool = False

    @property
    def task(self) -> Task:
        return self.method.task

    @property
    def trainable(self) -> list[torch.nn.Parameter]:
        return [p for p in self.task.model.parameters() if p.requires_grad]

    def apply(self) -> None:
        """Clips the gradients, moves the parameters, clears the gradients. NotFiniteError where clipping is no help."""
        most = self.config.max_grad_norm
        leaves = [*self.trainable, *self.method.parameters()]
        norm = finite_norm(float(torch.nn.utils.clip_grad_norm_(leaves, most)))
        if norm > LARGE * most and not self.warned:
            self.warned = True
            say(
                self.console,
                f"step {self.step + 1}: a gradient of norm {norm:.3g} clipped to {most:g}; so are others, unsaid",
            )
        self.norms.append(norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def batch(self, prompts: list[list[int]], *key: object) -> Batch:
        """Prompts with noise that `key` and the run's seed give."""
        config = self.config
        draw = Random(f"{config.seed} {key}")
        seeds = torch.tensor([draw.getrandbits(62) for _ in prompts])
        room = reach(self.task.model.config) or config.context_length
        longest = room - config.completion_length
        return batch_of(prompts, seeds, self.tokenizer.eos_id, longest, self.task.model.device)


def steps(state: Run, send: Send) -> dict[str, float]:
    """Trains to the end; returns how the policy did on the validation prompts before. send: gets what is recorded."""
    config, path = state.config, state.place / METRICS_FILE
    write_lines(path, state.records)

    def put(found: dict[str, Any]) -> None:
        append_line(path, found)
        state.records.append(found)
        send({name: value for name, value in found.items() if name != "step"}, found["step"])

    if not state.records:
        put({"step": 0, **_looks(state), "memory_bytes": _memory(state)})
    parts = {config.max_steps * i // CHECKPOINTS_PER_RUN for i in range(1, CHECKPOINTS_PER_RUN + 1)}
    name = f"{config.method}, seed {config.seed}"
    with Bar(state.console, name, config.max_steps, state.step) as bar, GentleStop(state.console) as stop:
        stop.stepping = True
        while state.step < config.max_steps and not stop.asked:
            found = _step(state)
            if state.step in parts:
                found |= _looks(state)
            put(found)
            bar.put(state.step, _line(found))
            if state.step in parts or stop.asked:
                save(state)
    if stop.asked:
        raise KeyboardInterrupt
    return {name: value for name, value in state.records[0].items() if name != "step"}


def _line(found: dict[str, Any]) -> str:
    return f"reward {found['train/reward']:.3f} · KL {found['train/kl']:.2f} · {found['seconds']:.1f} s/step"


def _step(state: Run) -> dict[str, Any]:
    """One step of the method on the batches of the accumulation."""
    config, began = state.config, time.perf_counter()
    tau = anneal(state.step, config.max_steps, config.tau_start, config.tau_end)
    parts, train = config.gradient_accumulation_steps, state.prompts["train"]
    order = Random(f"{config.seed} order").sample(train, len(train))
    batches = []
    for part in range(parts):
        at = (state.step * parts + part) * config.batch_size
        chosen = [order[(at + i) % len(order)] for i in range(config.batch_size)]
        batches.append(state.batch(chosen, "train", state.step, part))
    state.norms.clear()
    outcomes = state.method.step(batches, tau, state.apply)
    state.step += 1
    return {
        "step": state.step,
        "train/reward": fmean(x for outcome in outcomes for x in outcome.rewards),
        "train/kl": fmean(x for outcome in outcomes for x in outcome.kls),
        "grad_norm": fmean(state.norms),
        "clipped": max(state.norms) > config.max_grad_norm,
        "tau": tau,
        "coverage": fmean(outcome.coverage for outcome in outcomes),
        "seconds": time.perf_counter() - began,
        "peak_memory_bytes": peak_bytes(state.task.model.device),
    }


def _memory(state: Run) -> int:
    """What the gradient of one batch takes, of the first prompts of the run; over again where these are too few."""
    chosen = islice(cycle(state.prompts["train"]), state.config.batch_size)
    batch = state.batch(list(chosen), "memory")
    return memory_bytes(state.method, batch, state.config.tau_start)


def _looks(state: Run) -> dict[str, float]:
    """The validation prompts' reward; at the start, half-way and at the end how much a batch's gradient varies."""
    config = state.config
    found = evaluation(state, "validation")
    if state.step == 0:  # before the first gradient, and of other samples than its own, so without bias
        state.method.learn(found["val/reward_mean"], found["val/kl"])
    if config.variance_samples > 1 and state.step in (0, config.max_steps // 2, config.max_steps):
        tau = anneal(state.step, config.max_steps, config.tau_start, config.tau_end)
        batch = state.batch(state.prompts["train"][: min(VARIANCE_BATCH, config.batch_size)], "variance")
        varied = gradient_variance(state.method, batch, tau, config.variance_samples)
        found |= {"grad_variance": varied["variance"], "grad_mean_square": varied["mean_square"]}
    return found


def evaluation(state: Run, split: str) -> dict[str, float]:
    """The policy on a split's prompts, with noise of its own that no step changes."""
    prompts, size = state.prompts[split], EVALUATION_BATCH
    batches = (state.batch(prompts[i : i + size], split, i) for i in range(0, len(prompts), size))
    return {f"{SHORT.get(split, split)}/{name}": value for name, value in evaluate(state.task, batches).items()}


def save(state: Run) -> None:
    """checkpoint-N: what training changes, and where it stands; whole or not at all."""
    weights = {name: p.detach().cpu() for name, p in state.task.model.named_parameters() if p.requires_grad}
    values = {"weights": weights, "optimizer": state.optimizer.state_dict(), "method": state.method.state()}

    def write(path: Path) -> None:
        mark(state.place, path)
        torch.save(values, path / STATE_FILE)

    write_whole(checkpoint_at(state.place, state.step), write)
    finish_checkpoint(state.place, state.step)


def restore(state: Run) -> None:
    """Goes on from the last whole checkpoint, where there is one."""
    found = last_checkpoint(state.place)
    if found is None:
        return
    place, state.step = found
    state.records = records_at(place)
    with checkpoints.readable(place), torch.no_grad():
        values = torch.load(place / STATE_FILE, map_location="cpu", weights_only=True)
        for name, parameter in state.task.model.named_parameters():
            if parameter.requires_grad:
                parameter.copy_(values["weights"][name])
        state.optimizer.load_state_dict(values["optimizer"])
        state.method.load(values["method"])
