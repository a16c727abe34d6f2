"""TRL's trainers on a tiny model and a handful of texts, as they are or on the pass."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback, set_seed

from logitless.integrations.trl.trainers import install
from tests.support.workbench.micro import micro_directory, micro_model

# What the clock decides, and what says how often it was logged.
CLOCKED = ("time", "runtime", "per_second", "epoch", "flos")
TEXTS = ["one two three four", "a b c d e f g", "the cat sat on the mat", "over there", "1 2 3 4 5", "yes no yes"]
CHAT = "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"


def saved_model(place: Path, **shape: Any) -> Path:
    """A random model with its tokenizer where a trainer can load both, twice: policy and reference."""
    micro_directory(place, **shape)
    model = micro_model(bos_token_id=1, eos_token_id=2, pad_token_id=0, **shape)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(place)
    return place


def options(place: Path, **changes: Any) -> dict[str, Any]:
    """Arguments of a short run in fp32 whose updates are proportional to the gradients."""
    return {
        "output_dir": str(place / "run"),
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "report_to": [],
        "max_steps": 3,
        "per_device_train_batch_size": 4,
        "learning_rate": 0.05,
        "lr_scheduler_type": "constant",
        "optim": "sgd",
        "logging_steps": 1,
        "save_strategy": "no",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "seed": 3,
        **changes,
    }


def common(place: Path, rows: list[dict[str, Any]]) -> dict[str, Any]:
    tokenizer = AutoTokenizer.from_pretrained(place)
    tokenizer.chat_template = CHAT
    return {"processing_class": tokenizer, "train_dataset": Dataset.from_list(rows)}


def sft(place: Path, model: Any = None, trainer: dict[str, Any] | None = None, **changes: Any) -> Any:
    from trl import SFTConfig, SFTTrainer

    rows = [{"prompt": text[:4], "completion": text[4:]} for text in TEXTS]
    args = SFTConfig(**options(place, **{"max_length": 32, **changes}))
    return SFTTrainer(model or str(place), args, **common(place, rows), **(trainer or {}))


def pairs() -> list[dict[str, str]]:
    return [{"prompt": text[:3], "chosen": text[3:], "rejected": text[3:][::-1] + "x"} for text in TEXTS]


def dpo(place: Path, model: Any = None, trainer: type | None = None, **changes: Any) -> Any:
    from trl import DPOConfig, DPOTrainer

    args = DPOConfig(**options(place, max_length=32, **{"per_device_train_batch_size": 2, **changes}))
    return (trainer or DPOTrainer)(model or str(place), args=args, **common(place, pairs()))


def kto(place: Path, model: Any = None, **changes: Any) -> Any:
    from trl import KTOConfig, KTOTrainer

    rows = [{"prompt": text[:3], "completion": text[3:], "label": i % 2 == 0} for i, text in enumerate(TEXTS)]
    args = KTOConfig(**options(place, max_length=32, **changes))
    return KTOTrainer(model or str(place), args=args, **common(place, rows))


def vowels(completions: list[str], **_: Any) -> list[float]:
    """A reward: the share of vowels, in the stead of taste."""
    return [sum(c in "aeiou" for c in text) / (1 + len(text)) + 0.01 * len(text) for text in completions]


def prompts() -> list[dict[str, str]]:
    return [{"prompt": text[:6]} for text in TEXTS]


def grpo(place: Path, model: Any = None, trainer: type | None = None, **changes: Any) -> Any:
    from trl import GRPOConfig, GRPOTrainer

    sampled = {"num_generations": 4, "max_completion_length": 8, "beta": 0.1, "temperature": 0.8}
    args = GRPOConfig(**options(place, **{**sampled, **changes}))
    return (trainer or GRPOTrainer)(model or str(place), reward_funcs=vowels, args=args, **common(place, prompts()))


def rloo(place: Path, model: Any = None, **changes: Any) -> Any:
    from trl import RLOOConfig, RLOOTrainer

    sampled = {"num_generations": 4, "max_completion_length": 8, "beta": 0.1, "temperature": 0.8}
    args = RLOOConfig(**options(place, **{**sampled, **changes}))
    return RLOOTrainer(model or str(place), reward_funcs=vowels, args=args, **common(place, prompts()))


def distillation(place: Path, model: Any = None, **changes: Any) -> Any:
    from trl import DistillationConfig, DistillationTrainer

    args = DistillationConfig(**options(place, max_completion_length=8, **{"temperature": 0.9, **changes}))
    return DistillationTrainer(model or str(place), teacher_model=teacher(), args=args, **common(place, prompts()))


def teacher() -> Any:
    model = micro_model(hidden_size=48, num_hidden_layers=1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model.eval()


@dataclass
class Run:
    """What a run left: its logs, the first step's gradients, the parameters in the end."""

    logs: list[dict[str, float]]
    gradients: dict[str, Tensor]
    parameters: dict[str, Tensor]


@dataclass
class _Gradients(TrainerCallback):
    found: dict[str, Tensor] = field(default_factory=dict)

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        if not self.found:
            named = model.named_parameters()
            self.found = {name: p.grad.clone() for name, p in named if p.grad is not None}


def run(make: Callable[[], Any], ours: bool, **how: Any) -> Run:
    """Trains what `make()` returns, on the pass if it is to be ours."""
    set_seed(3)
    trainer = make()
    if ours:
        install(trainer, **how)
    seen = _Gradients()
    trainer.add_callback(seen)
    set_seed(3)
    trainer.train()
    logs = [
        {name: x for name, x in entry.items() if not any(word in name for word in CLOCKED)}
        for entry in trainer.state.log_history
    ]
    return Run(logs, seen.found, {name: p.detach().clone() for name, p in trainer.model.named_parameters()})


def assert_same(
    ours: Run, theirs: Run, rtol: float = 2e-4, atol: float = 2e-6, except_for: tuple[str, ...] = ()
) -> None:
    """Logs, gradients and parameters agree to fp32's rounding, and there was something to agree on."""
    assert len(ours.logs) == len(theirs.logs) > 1
    for mine, other in zip(ours.logs, theirs.logs, strict=True):
        assert mine.keys() == other.keys()
        kept = [name for name, x in mine.items() if isinstance(x, int | float) and name not in except_for]
        expected = {name: float(other[name]) for name in kept}
        torch.testing.assert_close({name: float(mine[name]) for name in kept}, expected, rtol=rtol, atol=1e-5)
    assert ours.gradients.keys() == theirs.gradients.keys() != set()
    for name, exact in theirs.gradients.items():
        close = rtol * exact.abs().max().item() + atol
        assert (ours.gradients[name] - exact).abs().max() <= close, name
    assert max(g.abs().max() for g in theirs.gradients.values()) > 1e-3
    torch.testing.assert_close(ours.parameters, theirs.parameters, rtol=rtol, atol=1e-5)


def assert_same_training(make: Callable[[], Any], except_for: tuple[str, ...] = ()) -> None:
    """What `make()` returns trains as TRL has it and on the pass, with the same logs, gradients and parameters."""
    assert_same(run(make, ours=True), run(make, ours=False), except_for=except_for)


class Products(TorchDispatchMode):
    """Counts the flop of matrix products, in-place ones included."""

    def __init__(self) -> None:
        super().__init__()
        self.flop = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in ("mm", "addmm", "addmm_", "bmm", "baddbmm", "baddbmm_"):
            a, b = args[-2:] if name in ("mm", "bmm") else args[1:3]
            self.flop += 2 * a.numel() * b.shape[-1]
        return func(*args, **(kwargs or {}))


def same(model: Any) -> Any:
    """A copy whose gradients are its own."""
    return copy.deepcopy(model)


def micro(place: Path) -> Any:
    """The saved model, for trainers that want an instance."""
    return AutoModelForCausalLM.from_pretrained(place)
