"""What is relied on in TRL, and a check that says which part of it another version has moved."""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from ...errors import ConfigError
from .. import seam

SETTINGS = ("temperature", "cast_lm_head_to_fp32", "outputs")
FIELDS = ("loss", "log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1", "label_mask", "aux_loss")
OUTPUT = "trl.trainer.utils:FusedCausalLMOutput"
FUSED = "trl.trainer.utils:add_fused_lm_head"
USE_ADAPTER = "trl.trainer.utils:use_adapter"
GATHER = "trl.trainer.utils:maybe_gather_lm_head_ctx"
DIVERGENCE = "trl.trainer.distillation_trainer:_chunked_divergence_loss"

# Trainer: its loss, and the parameters that it and what else is called or replaced have.
LOSS = {
    "SFTTrainer": "trl.trainer.sft_trainer:SFTTrainer.compute_loss",
    "DPOTrainer": "trl.trainer.dpo_trainer:DPOTrainer._compute_loss",
    "KTOTrainer": "trl.trainer.kto_trainer:KTOTrainer._compute_loss",
    "GRPOTrainer": "trl.trainer.grpo_trainer:GRPOTrainer._compute_loss",
    "RLOOTrainer": "trl.trainer.rloo_trainer:RLOOTrainer._compute_loss",
    "DistillationTrainer": "trl.trainer.distillation_trainer:DistillationTrainer._compute_loss",
    "CPOTrainer": "trl.experimental.cpo.cpo_trainer:CPOTrainer.concatenated_forward",
    "ORPOTrainer": "trl.experimental.orpo.orpo_trainer:ORPOTrainer.concatenated_forward",
    "GKDTrainer": "trl.experimental.gkd.gkd_trainer:GKDTrainer.compute_loss",
}
OF_LOGITS = ("GOLDTrainer", "ServerDistillationTrainer")  # which derive from these, with losses of whole logits
PARAMETERS: dict[str, tuple[str, ...]] = {
    FUSED: ("model", *SETTINGS),
    USE_ADAPTER: ("model", "adapter_name"),
    GATHER: ("params",),
    LOSS["SFTTrainer"]: ("self", "model", "inputs", "return_outputs", "num_items_in_batch"),
    LOSS["DPOTrainer"]: ("self", "model", "inputs", "return_outputs"),
    LOSS["KTOTrainer"]: ("self", "model", "inputs", "return_outputs"),
    LOSS["GRPOTrainer"]: ("self", "model", "inputs"),
    LOSS["RLOOTrainer"]: ("self", "model", "inputs"),
    LOSS["DistillationTrainer"]: ("self", "unwrapped_student", "inputs", "num_items_in_batch"),
    LOSS["CPOTrainer"]: ("self", "model", "batch"),
    LOSS["ORPOTrainer"]: ("self", "model", "batch"),
    LOSS["GKDTrainer"]: ("self", "model", "inputs", "return_outputs", "num_items_in_batch"),
    DIVERGENCE: (
        "student_hidden_states",
        "teacher_hidden_states",
        "student_lm_head_weight",
        "teacher_lm_head_weight",
        "completion_mask",
        "beta",
        "num_items_in_batch",
        "student_lm_head_bias",
        "teacher_lm_head_bias",
        "student_logit_scale",
        "teacher_logit_scale",
        "student_final_logit_softcapping",
        "teacher_final_logit_softcapping",
        "temperature",
    ),
}
HOST = seam.Seam("trl", ">=1.16,<1.17", PARAMETERS)  # what the tests run with
# What a trainer needs beside its own loss. Those of the first five have TRL's fused head.
FUSED_TRAINERS = ("SFTTrainer", "DPOTrainer", "KTOTrainer", "GRPOTrainer", "RLOOTrainer")
ROLLOUT_TRAINERS = ("GRPOTrainer", "RLOOTrainer")
ALSO = dict.fromkeys(FUSED_TRAINERS, (FUSED,)) | {"DistillationTrainer": (DIVERGENCE, GATHER)}
# What a replay of the entries that tokens were sampled from wraps: the trainer's own steps.
SAMPLING = {
    kind: tuple(f"{LOSS[kind].rsplit('.', 1)[0]}.{name}" for name in (
        "_generate_single_turn", "_generate_and_score_completions", "_get_per_token_logps_and_entropies"
    ))
    for kind in ROLLOUT_TRAINERS
}  # fmt: skip
FIRST = {"_generate_single_turn": ("self", "prompt_ids"), "_generate_and_score_completions": ("self", "inputs"),
         "_get_per_token_logps_and_entropies": ("self", "model", "input_ids", "attention_mask", "logits_to_keep",
                                                "batch_size")}  # fmt: skip
ROLLOUTS = SAMPLING["GRPOTrainer"][1]  # in which the exact KL keeps GRPO from running its reference
# The one place where GRPO turns the reference's log-probs into a KL.
K3 = (
    'inputs["ref_per_token_logps"]',
    "torch.exp(ref_per_token_logps - per_token_logps) - (ref_per_token_logps - per_token_logps) - 1",
)


def kind_of(trainer: Any) -> str:
    """The name of TRL's trainer class that `trainer` is or derives from. Raises ConfigError for others."""
    names = [c.__name__ for c in type(trainer).__mro__ if c.__module__.startswith("trl.")]
    found = None if set(names) & set(OF_LOGITS) else next((name for name in names if name in LOSS), None)
    if found is None:
        raise ConfigError(f"trainer: expected a TRL {', '.join(LOSS)}, got {type(trainer).__name__}")
    return found


def own_loss(trainer: Any, kind: str) -> bool:
    """Whether the trainer computes its loss with TRL's own method."""
    return _own(trainer, LOSS[kind])


def calls_own_loss(trainer: Any, kind: str) -> bool:
    """As `own_loss`, or with a method of its own that calls TRL's as super()'s, as far as its code tells."""
    name = LOSS[kind].rsplit(".", 1)[1]
    return name not in vars(trainer) and _found(LOSS[kind]) in seam.methods_called(type(trainer), name)


def only_own_loss(trainer: Any, kind: str) -> bool:
    """Whether `own_loss` is all of it: a compute_loss of one's own may add what it likes to TRL's."""
    return own_loss(trainer, kind) and _own(trainer, f"{LOSS[kind].rsplit('.', 1)[0]}.compute_loss")


def _own(trainer: Any, method: str) -> bool:
    name = method.rsplit(".", 1)[1]
    return name not in vars(trainer) and getattr(type(trainer), name) is _found(method)


def require(kind: str, *, exact_kl: bool = False, replay: bool = False) -> None:
    """Raises ConfigError that names what has moved in the TRL that is installed."""
    names = (LOSS[kind], *ALSO.get(kind, ()), *((USE_ADAPTER,) if exact_kl else ()))
    changed = [line for name in names if (line := moved(name))]
    if kind in FUSED_TRAINERS:
        changed += filter(None, [moved_fields()])
    if exact_kl:
        changed += filter(None, [moved_k3(), moved_start(ROLLOUTS)])
    if replay:
        changed += filter(None, map(moved_start, SAMPLING[kind]))
    if changed:
        raise HOST.error("; ".join(changed))


def moved(name: str) -> str:
    """What is no longer as expected about one function of TRL, '' where nothing is."""
    return seam.moved(name, PARAMETERS.get(name, ()))


def moved_start(name: str) -> str:
    """As `moved`, of a function whose first parameters alone are relied on."""
    short, expected = name.split(":")[1], FIRST[name.rsplit(".", 1)[1]]
    try:
        got = tuple(inspect.signature(_found(name)).parameters)[: len(expected)]
    except (ImportError, AttributeError):
        return f"{name} is gone"
    return "" if got == expected else f"{short} begins with ({', '.join(got)}), expected ({', '.join(expected)})"


def moved_fields() -> str:
    """What is no longer as expected about TRL's output, '' where nothing is."""
    try:
        got = tuple(field.name for field in fields(_found(OUTPUT)))
    except (ImportError, AttributeError):
        return f"{OUTPUT} is gone"
    return "" if got == FIELDS else f"FusedCausalLMOutput has ({', '.join(got)}), expected ({', '.join(FIELDS)})"


def moved_k3() -> str:
    """What is no longer as expected about GRPO's sampled KL, '' where nothing is."""
    name = LOSS["GRPOTrainer"]
    source = " ".join(inspect.getsource(_found(name)).split())
    lost = [text for text in K3 if text not in source]
    return f"{name.split(':')[1]} no longer says {lost[0]!r}" if lost else ""


def _found(name: str) -> Any:
    return pkgutil.resolve_name(name)


@dataclass(frozen=True)
class Settings:
    """What a trainer asked its fused head for."""

    temperature: float = 1.0
    cast_lm_head_to_fp32: bool = False
    outputs: tuple[str, ...] = ("log_probs",)


def settings_of(forward: Callable[..., Any]) -> Settings:
    """The settings that TRL's fused forward closes over, beneath accelerate's wrappers. Raises ConfigError."""
    function: Any = getattr(forward, "__func__", forward)
    while function is not None:
        code = getattr(function, "__code__", None)
        if code is not None and set(SETTINGS) <= set(code.co_freevars):
            cells = dict(zip(code.co_freevars, function.__closure__, strict=True))
            return Settings(*(cells[name].cell_contents for name in SETTINGS))
        function = getattr(function, "__wrapped__", None)
    raise HOST.error(
        f"expected model.forward to be what add_fused_lm_head puts there, closing over {', '.join(SETTINGS)}: call "
        "install right after the trainer is made"
    )
