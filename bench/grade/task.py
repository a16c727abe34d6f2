"""What methods do on the embedded task: the legacy's curves, gradient variance, and what is learned."""

import json
import tempfile
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from bench.harness import read_lines
from logitless.relax import anneal, generate, online_kl
from logitless.workbench.common.written import METRICS_FILE, SUMMARY_FILE
from logitless.workbench.grade.comparison.criteria import LEGACY_OF
from logitless.workbench.grade.comparison.intervals import SAID
from logitless.workbench.grade.comparison.report import table
from logitless.workbench.grade.config import LEGACY, METHODS_COMPARED, GradeConfig
from logitless.workbench.grade.method import Batch, Method, Outcome
from logitless.workbench.grade.methods import METHODS
from logitless.workbench.grade.single import policy_of, set_up
from logitless.workbench.grade.steps import Run, evaluation
from logitless.workbench.runs.rundir import stored

Record = dict[str, Any]


def opened(config: GradeConfig) -> Run:
    """The embedded task as a run would start on it."""
    console = Console(stderr=True)
    source, tokenizer = policy_of(config, console)
    with tempfile.TemporaryDirectory() as place:
        return set_up(config, Path(place), source, tokenizer, console)


def method_of(run: Run, method: str, **changes: Any) -> Method:
    """A method on the run's own models."""
    return METHODS[method](replace(run.task, config=replace(run.config, method=method, **changes)))


def gradient(method: Method, batch: Batch, tau: float) -> tuple[Tensor, Outcome]:
    """(all the policy's gradients, flat; the batch's rewards and KL)."""
    model = method.task.model
    model.zero_grad(set_to_none=True)
    outcome = method.backward(batch, tau)
    found = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    model.zero_grad(set_to_none=True)
    return found, outcome


def curves(config: GradeConfig, steps: int) -> Record:
    """ste_legacy trains; at each of its steps, what ste makes of the same parameters, batch and noise.

    Of k=V, and of the configured k with the mass that it leaves out.
    """
    run = opened(config)
    model, vocab = run.task.model, run.task.vocab_size
    legacy = method_of(run, "ste_legacy")
    others = {"all": method_of(run, "ste", top_k=vocab), "few": method_of(run, "ste")}
    rows, late = [], late_kl(run, run.batch(run.prompts["train"][: config.batch_size], "late"))
    for step in range(steps):
        tau = anneal(step, steps, config.tau_start, config.tau_end)
        size = config.batch_size
        chosen = [run.prompts["train"][(step * size + i) % len(run.prompts["train"])] for i in range(size)]
        batch = run.batch(chosen, "curves", step)
        exact, outcome = gradient(legacy, batch, tau)
        row: Record = {"step": step, "tau": tau, "reward": outcome.rewards, "kl": outcome.kls}
        for name, method in others.items():
            found, ours = gradient(method, batch, tau)
            row[name] = {
                "reward": ours.rewards,
                "kl": ours.kls,
                "gradient_error": float((found - exact).norm() / exact.norm()),
                "outside": 1 - ours.coverage,
            }
        rows.append(row)
        place_gradient(model, exact)
        run.apply()
    return {"config": told(config), "policy": size_of(run), "rows": rows, "late_kl": late}


@torch.no_grad()
def late_kl(run: Run, batch: Batch) -> float:
    """Nats per token of an unchanged policy against a reference that has read one token more."""
    reference = run.task.readers()[1]
    rollout = generate(reference, batch.prompts, batch.mask, batch.seeds, run.task.sampling())
    hidden, head = rollout.hidden, reference.head()
    return float(online_kl(hidden[:, :-1], head, (hidden[:, 1:], head)).mean())


def place_gradient(model: Any, flat: Tensor) -> None:
    leaves = [p for p in model.parameters() if p.requires_grad]
    ends = [0, *torch.tensor([p.numel() for p in leaves]).cumsum(0).tolist()]
    for p, (begin, end) in zip(leaves, pairwise(ends), strict=True):
        p.grad = flat[begin:end].view_as(p).clone()


def variance(config: GradeConfig, samples: int, blocks: int, taus: tuple[float, ...] = (2.0, 1.0, 0.5)) -> Record:
    """The variance of one batch's gradient over draws of the noise, the policy unchanged, in `blocks` of draws.

    reinforce's baseline is what a run begins with, the mean gain of the validation prompts. `cosine`: of the mean
    gradient with reinforce's, which has no bias; `halves`: of two halves of reinforce's own draws.
    """
    run = opened(config)
    batch = run.batch(run.prompts["train"][: config.batch_size], "variance")
    score, before = method_of(run, "reinforce"), evaluation(run, "validation")
    score.learn(before["val/reward_mean"], before["val/kl"])
    kinds = [("reinforce", 1.0), *((name, tau) for name in ("ste", "gumbel") for tau in taus)]
    rows, exact, halves = [], None, 1.0
    for name, tau in kinds:
        method = score if name == "reinforce" else method_of(run, name)
        found = torch.stack([gradient(method, draw(batch, i), tau)[0] for i in range(samples)])
        mean = found.mean(0)
        if exact is None:
            exact, halves = mean, cosine(found[::2].mean(0), found[1::2].mean(0))
        parts = [variance_of(part) for part in found.chunk(blocks)]
        rows.append(
            {
                "method": name,
                "tau": tau,
                "variance": variance_of(found),
                "variances": parts,
                "mean_square": max(0.0, float(mean.square().sum()) - variance_of(found) / samples),
                "cosine": cosine(mean, exact),
            }
        )
    return {"config": told(config), "policy": size_of(run), "samples": samples, "halves": halves, "rows": rows}


def size_of(run: Run) -> Record:
    """Of the policy without its adapters."""
    own = [p.numel() for name, p in run.task.model.named_parameters() if "lora_" not in name]
    return {"parameters": sum(own), "vocab": run.task.vocab_size}


def draw(batch: Batch, number: int) -> Batch:
    """The batch with other noise."""
    return replace(batch, seeds=batch.seeds + 7919 * (number + 1))


def variance_of(gradients: Tensor) -> float:
    """The trace of the covariance of (samples, parameters)."""
    return float(gradients.double().var(0).sum())


def cosine(a: Tensor, b: Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(a, b, dim=0))


def learning(place: Path) -> Record:
    """What `logitless align --method all --seeds N` came to, of the seeds that are finished; ste_legacy beside ste."""
    config = stored(place, GradeConfig())
    found = {path.parent.name: json.loads(path.read_text("utf-8")) for path in place.glob(f"*-*/{SUMMARY_FILE}")}
    one = next(iter(found.values()))
    adapters = one["trainable_parameters"] if config.lora_rank else 0
    size = {"parameters": one["parameters"] - adapters, "vocab": one["vocab_size"]}

    def compared(names: tuple[str, ...]) -> Record:
        methods = [name for name in names if any(run.rpartition("-")[0] == name for run in found)]
        seeds = range(config.seed, config.seed + config.seeds)
        whole = [n for n in seeds if all(f"{m}-{n}" in found for m in methods)]
        runs = {m: [f"{m}-{n}" for n in whole] for m in methods}
        return {
            "seeds": len(whole),
            "missing": [name for name in names if name not in methods],
            "validation": {m: _validation([place / run for run in of]) for m, of in runs.items()},
            **table([found[run] for of in runs.values() for run in of]),
        }

    ours = compared(tuple(name for name in METHODS_COMPARED if name not in LEGACY))
    legacy = compared(("ste", "ste_legacy"))
    return {"config": told(config), "policy": size, "steps": config.max_steps, **ours, "legacy": legacy}


def legacy(place: Path) -> Record:
    """Each new method beside its own legacy, of the runs METHOD-SEED in a folder: of the seeds that have both."""
    found = {path.parent.name: json.loads(path.read_text("utf-8")) for path in place.glob(f"*-*/{SUMMARY_FILE}")}
    pairs: Record = {}
    for new, old in LEGACY_OF.items():
        seeds = sorted(n for m, _, n in (run.rpartition("-") for run in found) if m == new and f"{old}-{n}" in found)
        if seeds:
            compared = table([found[f"{method}-{n}"] for method in (new, old) for n in seeds])
            verdicts = [x for x in compared["criteria"] if x["method"] == new]
            pairs[new] = {**compared["beside_legacy"][new], "seeds": len(seeds), "criteria": verdicts}
            pairs[new]["rewards"] = {name: x["test_reward"] for name, x in compared["methods"].items()}
    if not pairs:
        raise SystemExit(f"{place}: expected runs of a method and its legacy, such as ste-0 and ste_legacy-0")
    config = stored(next(place.glob(f"*-*/{SUMMARY_FILE}")).parent, GradeConfig())
    one = next(iter(found.values()))
    adapters = one["trainable_parameters"] if config.lora_rank else 0
    size = {"parameters": one["parameters"] - adapters, "vocab": one["vocab_size"]}
    return {"config": told(config), "policy": size, "steps": config.max_steps, "intervals": SAID, "pairs": pairs}


def _validation(runs: list[Path]) -> Record:
    """By step, the mean validation reward of some runs."""
    rows = [row for run in runs for row in read_lines(run / METRICS_FILE) if "val/reward_mean" in row]
    steps = sorted({row["step"] for row in rows})
    return {str(n): fmean(row["val/reward_mean"] for row in rows if row["step"] == n) for n in steps}


def told(config: GradeConfig) -> Record:
    """The options that are not about places."""
    kept = (
        "prompt_length", "completion_length", "batch_size", "gradient_accumulation_steps", "top_k", "beta", "tau_start",
        "tau_end", "lora_rank",
    )  # fmt: skip
    return {name: getattr(config, name) for name in kept} | {"rate": config.rate}
