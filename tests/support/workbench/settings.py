"""Settings across every knob, and a plan as plain values: the same in Python and in the page's script."""

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

from logitless.errors import OptionError
from logitless.models.catalog import from_config, shape_of
from logitless.models.shapes import Traced
from logitless.units import format_bytes
from logitless.workbench.plan.plan import Plan, both
from logitless.workbench.plan.plots import category
from logitless.workbench.plan.report import headline, lives, notes
from logitless.workbench.plan.setting import CHOICES, GIB, Setting

EXPERTS = from_config(
    {
        "model_type": "qwen2_moe",
        "vocab_size": 151_936,
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
        "mlp_only_layers": [0],
    },
    "experts <b>",
)
ADAPTED = replace(EXPERTS, name="adapted", shared_mlp=0, adapted_experts=True)
OWN = replace(
    shape_of("llama-3.1-8b"),
    name="own",
    in_catalog=False,
    uncounted=5,
    traced=Traced(9_000_000, 300_000, 70_000),
    stateful=True,
)
SCORED = replace(
    EXPERTS, name="scored", in_catalog=False, uncounted=-5, traced=Traced(900_000, 50_000, 9000, 700, 30, 60, rank=16)
)
MODELS = [shape_of("4b"), shape_of("gemma-2-2b"), shape_of("llama-3.1-8b"), EXPERTS, ADAPTED, OWN, SCORED]
LENGTHS = (1, 777, 131_072, 1 << 40)  # the last takes bytes past 2^53
KNOBS: dict[str, tuple[Any, ...]] = {
    **{name: values for name, values in CHOICES.items() if name not in ("algorithm", "sharding")},
    "batch_size": (1, 3, 64, 1000, 0, 1 << 61),
    "responses_per_prompt": (1, 8, 7),
    "prompt_length": (0, 511, 4096),
    "validation_length": (0, 9000),
    "micro_batch": (0, 1, 5),
    "rollout_batch": (0, 3),
    "gpus": (1, 8, 12, 1000),
    "gpu_bytes": (80 * GIB, 24 * 10**9, 1 << 62),
    "reserve": (0, 2 * GIB),
    "tensor_parallel": (1, 2, 4),
    "context_parallel": (1, 2),
    "master_weights": (True, False),
    "mlp_tiles": (1, 1, 8),
    "offload_activations": (False, True),
    "lora_rank": (0, 0, 16),
    "critic_shape": (None, shape_of("qwen2.5-0.5b")),
    "reward_shape": (None, shape_of("gemma-3-1b")),
    "top_k": (256, 1_000_000, 0),
    "memory_budget": (256 << 20, 1, 1 << 34),
}


def grid() -> Iterator[Setting]:
    """Models × algorithms × shardings × checkpointing × lengths, the other knobs at random (always the same)."""
    draw = random.Random(0)
    for model, algorithm, sharding, checkpointing, length in product(
        MODELS, CHOICES["algorithm"], CHOICES["sharding"], (False, True), LENGTHS
    ):
        setting = Setting(
            model, algorithm, sharding=sharding, gradient_checkpointing=checkpointing, response_length=length, gpus=8
        )
        some = draw.sample(sorted(KNOBS), draw.randrange(len(KNOBS)))
        yield replace(setting, **{name: draw.choice(KNOBS[name]) for name in some})


def told(setting: Setting) -> Any:
    """Everything that the page shows of a setting; numbers as text, as JSON has none past 2^53."""
    try:
        plans = both(setting)
    except OptionError as error:
        return str(error)
    return [headline(setting, "GiB"), notes(setting), [_plan(plan) for plan in plans]]


def _plan(plan: Plan) -> list[Any]:
    phases = plan.setting.kind.phases
    rows = [
        (
            c.name,
            c.shape,
            str(c.nbytes),
            c.phases,
            str(c.largest),
            category(c.name),
            lives(c, phases),
            *_sizes(c.nbytes),
        )
        for c in plan.components
    ]
    peaks = [[phase, str(count)] for phase, count in plan.peaks.items()]
    return [rows, peaks, plan.peak_phase, str(plan.peak), plan.largest.name, str(plan.margin), plan.fits]


def _sizes(nbytes: int) -> tuple[str, str]:
    return format_bytes(nbytes), format_bytes(nbytes, "GB")


# The same of `planner`, the translated object.
TOLD = """
const told = (setting) => {
  let plans;
  try { plans = planner.both(setting); } catch (error) {
    if (error.name !== "OptionError") throw error;
    return error.message;
  }
  return [planner.headline(setting, "GiB"), planner.notes(setting), plans.map((plan) => {
    const phases = plan.setting.kind.phases;
    return [
      plan.components.map((c) => [c.name, c.shape, `${c.nbytes}`, c.phases, `${c.largest}`, planner.category(c.name),
        planner.lives(c, phases), planner.format_bytes(c.nbytes), planner.format_bytes(c.nbytes, "GB")]),
      [...plan.peaks].map(([phase, count]) => [phase, `${count}`]),
      plan.peak_phase, `${plan.peak}`, plan.largest.name, `${plan.margin}`, plan.fits];
  })];
};
"""
