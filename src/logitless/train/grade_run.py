"""The steps of alignment through soft tokens: gradients, clipping, metrics, checkpoints."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

import torch
from rich.console import Console

from ..memory.resident import peak_bytes
from ..relax import anneal
from .callbacks import GentleStop
from .checkpoints import last_checkpoint
from .files import append_line, read_lines, write_lines, write_whole
from .grade_config import GradeConfig
from .grade_data import Prompts, batch_of
from .grade_models import finite_norm
from .grade_step import Batch, Outcome, Task, backward, evaluate
from .progress import say
from .sft import METRICS_FILE
from .tokenizer import TextTokenizer

CHECKPOINTS_PER_RUN = 4
STATE_FILE, LAST_FILE = "grade.pt", "trainer_state.json"
EVALUATION_BATCH = 8
LARGE = 100  # times the norm that gradients are clipped to: worth a line


@dataclass(eq=False)
class Run:
    """A run's place, parts and state."""

    config: GradeConfig
    place: Path
    task: Task
    tokenizer: TextTokenizer
    prompts: Prompts
    optimizer: torch.optim.Optimizer
    console: Console
    step: int = 0
    baseline: float | None = None  # the moving average of rewards less KL

    @property
    def trainable(self) -> list[torch.nn.Parameter]:
        return [p for p in self.task.model.parameters() if p.requires_grad]

    def batch(self, prompts: list[list[int]], *key: object) -> Batch:
        """Prompts with noise that `key` and the run's seed give."""
        config, text = self.config, self.task.model.config.get_text_config()
        draw = Random(f"{config.seed} {key}")
        seeds = torch.tensor([draw.getrandbits(62) for _ in prompts])
        room = getattr(text, "max_position_embeddings", None) or config.context_length
        longest = room - config.completion_length
        return batch_of(prompts, seeds, self.tokenizer.eos_id, longest, self.task.model.device)


def steps(state: Run) -> dict[str, float]:
    """Trains to the end; returns how the policy did on the validation prompts before."""
    config, path = state.config, state.place / METRICS_FILE
    records = [x for x in read_lines(path) if x["step"] <= state.step]  # a killed run may have written a few more
    write_lines(path, records)
    if not records:
        append_line(path, {"step": 0, **evaluation(state, "validation")})
    every = max(1, config.max_steps // CHECKPOINTS_PER_RUN)
    with GentleStop(state.console) as stop:
        stop.stepping = True
        while state.step < config.max_steps and not stop.asked:
            append_line(path, _step(state))
            if state.step % every == 0 or state.step == config.max_steps or stop.asked:
                save(state)
    if state.step < config.max_steps:
        raise KeyboardInterrupt
    first = next(x for x in read_lines(path) if x["step"] == 0)
    return {name: value for name, value in first.items() if name != "step"}


def _step(state: Run) -> dict[str, Any]:
    """One optimiser step: the gradients of every forward pass of the accumulation, clipped."""
    config, began = state.config, time.perf_counter()
    tau = anneal(state.step, config.max_steps, config.tau_start, config.tau_end)
    parts, train = config.gradient_accumulation_steps, state.prompts["train"]
    state.optimizer.zero_grad(set_to_none=True)
    outcomes: list[Outcome] = []
    for part in range(parts):
        at = (state.step * parts + part) * config.batch_size
        chosen = [train[(at + i) % len(train)] for i in range(config.batch_size)]
        batch = state.batch(chosen, "train", state.step, part)
        outcomes.append(backward(state.task, batch, tau, state.baseline or 0.0, 1 / parts))
    norm = finite_norm(float(torch.nn.utils.clip_grad_norm_(state.trainable, config.max_grad_norm)))
    if norm > LARGE * config.max_grad_norm:
        say(state.console, f"step {state.step + 1}: a gradient of norm {norm:.3g} clipped to {config.max_grad_norm:g}")
    state.optimizer.step()
    state.step += 1
    reward = fmean(x for outcome in outcomes for x in outcome.rewards)
    kl = fmean(x for outcome in outcomes for x in outcome.kls)
    decay, gain = config.baseline_decay, reward - config.beta * kl
    state.baseline = gain if state.baseline is None else decay * state.baseline + (1 - decay) * gain
    return {
        "step": state.step,
        "train/reward": reward,
        "train/kl": kl,
        "grad_norm": norm,
        "clipped": norm > config.max_grad_norm,
        "tau": tau,
        "coverage": fmean(outcome.coverage for outcome in outcomes),
        "baseline": state.baseline,
        "seconds": time.perf_counter() - began,
        "peak_memory_bytes": peak_bytes(state.task.model.device),
    }


def evaluation(state: Run, split: str) -> dict[str, float]:
    """The policy on a split's prompts, with noise of its own that no step changes."""
    prompts, size = state.prompts[split], EVALUATION_BATCH
    batches = (state.batch(prompts[i : i + size], split, i) for i in range(0, len(prompts), size))
    return {f"{split}/{name}": value for name, value in evaluate(state.task, batches).items()}


def save(state: Run) -> None:
    """checkpoint-N: what training changes, and where it stands; whole or not at all."""
    weights = {name: p.detach().cpu() for name, p in state.task.model.named_parameters() if p.requires_grad}
    values = {"weights": weights, "optimizer": state.optimizer.state_dict(), "baseline": state.baseline}

    def write(path: Path) -> None:
        path.mkdir()
        torch.save(values, path / STATE_FILE)
        (path / LAST_FILE).write_text(json.dumps({"global_step": state.step}), encoding="utf-8")

    write_whole(state.place / f"checkpoint-{state.step}", write)


def restore(state: Run) -> None:
    """Goes on from the last whole checkpoint, where there is one."""
    found = last_checkpoint(state.place)
    if found is None:
        return
    place, state.step = found
    values = torch.load(place / STATE_FILE, map_location="cpu", weights_only=True)
    with torch.no_grad():
        for name, parameter in state.task.model.named_parameters():
            if parameter.requires_grad:
                parameter.copy_(values["weights"][name])
    state.optimizer.load_state_dict(values["optimizer"])
    state.baseline = values["baseline"]
