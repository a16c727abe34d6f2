"""What a step of each method takes at the sizes of a real vocabulary: memory, stored soft tokens, time."""

from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForSequenceClassification

from bench.grade.carry import adapted
from bench.harness import MB, ResidentPeak, Worker, in_turns, release_memory
from logitless.relax import Sampling, generate
from logitless.workbench.grade.config import GradeConfig
from logitless.workbench.grade.legacy import rollout_bytes
from logitless.workbench.grade.method import Batch, Method, Task
from logitless.workbench.grade.methods import METHODS
from logitless.workbench.grade.models import SoftReward
from tests.support.allocations import AllocationTracker

Record = dict[str, Any]
PAIRS = {"ste": "ste_legacy", "gumbel": "gumbel_legacy"}


@dataclass(frozen=True)
class Sizes:
    """A policy of random weights with LoRA on a frozen body, and a reward model of half its width and depth."""

    vocab: int = 131072
    hidden: int = 256
    layers: int = 4
    prompt: int = 32
    steps: int = 64
    batch: int = 1
    k: int = 256
    device: str = "cpu"

    def config(self, method: str, carry: str = "sweeps") -> GradeConfig:
        return GradeConfig(
            method=method, carry=carry, prompt_length=self.prompt, completion_length=self.steps,
            batch_size=self.batch, top_k=self.k, device=self.device,
        )  # fmt: skip

    def shape(self, divisor: int) -> Qwen3Config:
        width = self.hidden // divisor
        return Qwen3Config(
            vocab_size=self.vocab, hidden_size=width, intermediate_size=3 * width, head_dim=32,
            num_hidden_layers=max(1, self.layers // divisor), num_attention_heads=max(1, width // 32),
            num_key_value_heads=max(1, width // 64), tie_word_embeddings=True, num_labels=2, pad_token_id=0,
        )  # fmt: skip


def task_of(sizes: Sizes, method: str, carry: str = "sweeps") -> Task:
    """Everything that a method needs."""
    torch.manual_seed(0)
    model = adapted(sizes.shape(1)).to(sizes.device)
    reward = SoftReward.of(Qwen3ForSequenceClassification(sizes.shape(2)).to(sizes.device), sizes.vocab, 1)
    return Task(sizes.config(method, carry), model, None, reward, sizes.vocab, end=None)


def method_of(task: Task, method: str, carry: str = "sweeps") -> Method:
    return METHODS[method](replace(task, config=replace(task.config, method=method, carry=carry)))


def batch_of(sizes: Sizes) -> Batch:
    prompts = torch.randint(sizes.vocab, (sizes.batch, sizes.prompt), generator=torch.Generator().manual_seed(3))
    prompts, seeds = prompts.to(sizes.device), torch.arange(sizes.batch, device=sizes.device)
    return Batch(prompts, torch.ones_like(prompts), seeds)


class DevicePeak:
    """What a GPU's allocator gave to the block above what was there before."""

    def __enter__(self) -> "DevicePeak":
        torch.cuda.reset_peak_memory_stats()
        self.baseline = torch.cuda.memory_allocated()
        return self

    def __exit__(self, *_: object) -> None:
        self.above_mb = (torch.cuda.max_memory_allocated() - self.baseline) / MB


class Subject:
    """One method in a process of its own."""

    def __init__(self, sizes: Sizes, method: str, carry: str) -> None:
        torch.set_num_threads(1)  # the harness' two would wait for each other where others run
        self.task = task_of(sizes, method, carry)
        self.method, self.sizes = method_of(self.task, method, carry), sizes

    def step(self, sizes: Sizes) -> None:
        self.method.backward(batch_of(sizes), 1.0)
        self.task.model.zero_grad(set_to_none=True)

    def peak(self) -> Record:
        """MB above the weights: the resident set's (on a GPU its allocator's), and what operators allocated."""
        short = replace(self.task, config=replace(self.task.config, completion_length=2))
        type(self.method)(short).backward(batch_of(self.sizes), 1.0)  # the warm-up
        self.task.model.zero_grad(set_to_none=True)
        release_memory()
        with DevicePeak() if self.sizes.device == "cuda" else ResidentPeak() as peak:
            self.step(self.sizes)
        release_memory()
        with AllocationTracker() as tracker:
            self.step(self.sizes)
        weights = {p.data_ptr(): p.nbytes for m in (self.task.model, self.task.reward.model) for p in m.parameters()}
        return {
            "resident_mb": peak.above_mb,
            "allocated_mb": tracker.peak / MB,
            "largest_mb": tracker.largest / MB,
            "weights_mb": sum(weights.values()) / MB,
        }

    def told(self) -> float:
        """MB that a legacy method says it needs."""
        sizes = self.sizes
        return rollout_bytes(self.task.readers()[0], sizes.batch, sizes.prompt, sizes.steps) / MB


def memory(sizes: Sizes) -> Record:
    """Peak memory of a step above the weights, each method in a process of its own."""
    rows = []
    for method, carry in (*((m, "sweeps") for pair in PAIRS.items() for m in pair), ("ste", "cached")):
        worker = Worker(Subject, sizes, method, carry)
        row = {"method": method, "carry": None if method.endswith("legacy") else carry, **worker.call("peak")}
        if method.endswith("legacy"):
            row["told_mb"] = worker.call("told")
        worker.stop()
        rows.append(row)
    return {"sizes": vars(sizes), "rows": rows}


def storage(sizes: Sizes, steps: tuple[int, ...] = (16, 32, 64, 128), ks: tuple[int, ...] = (64, 256, 1024)) -> Record:
    """Bytes of the soft tokens that a rollout holds, and of all that it keeps for its backward."""
    task = task_of(sizes, "ste")
    batch, (policy, _) = batch_of(sizes), task.readers()
    rows = []
    for n in steps:
        for k in ks:
            with AllocationTracker() as tracker:
                rollout = generate(
                    policy, batch.prompts, batch.mask, batch.seeds, Sampling(n, 1.0, min(k, sizes.vocab))
                )
                kept = tracker.live
            soft = sum(x.untyped_storage().nbytes() for x in vars(rollout.soft).values() if isinstance(x, torch.Tensor))
            rows.append({"steps": n, "k": k, "soft_bytes": soft, "kept_bytes": kept})
            del rollout
    return {"sizes": vars(sizes), "rows": rows, "whole_bytes_per_step": 4 * sizes.batch * sizes.vocab}


def timing(sizes: Sizes, rounds: int = 5) -> Record:
    """Seconds of a step of each method, in turns, and the ratio to its legacy's within a round."""
    task, batch = task_of(sizes, "ste"), batch_of(sizes)
    methods = {name: method_of(task, name) for pair in PAIRS.items() for name in pair}

    def step(method: Method) -> None:
        method.backward(batch, 1.0)
        task.model.zero_grad(set_to_none=True)

    turns = in_turns({name: partial(step, method) for name, method in methods.items()}, rounds)
    seconds = {name: [turn.wall for turn in each] for name, each in turns.items()}
    rows = [
        {
            "method": name,
            "seconds": median(seconds[name]),
            "legacy_seconds": median(seconds[old]),
            "ratio": median(a / b for a, b in zip(seconds[name], seconds[old], strict=True)),
            "ratios": [a / b for a, b in zip(seconds[name], seconds[old], strict=True)],
        }
        for name, old in PAIRS.items()
    ]
    return {"sizes": vars(sizes), "rounds": rounds, "rows": rows}
