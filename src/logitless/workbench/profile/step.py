"""One training step of a transformers model, traced on fake tensors or run for real."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import nn

from ...algebra.costs import DEFAULT_BUDGET
from ...errors import ConfigError, LogitlessError, OptionError, in_one_line
from ...integrations.transformers.install import install
from ...models.catalog import shape_of
from ...models.instances import configuration, with_adapters
from ...units import LARGEST
from .recording import Recording
from .trace import trace

LOSSES = ("dense", "logitless")
OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer | None]] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-5, fused=True),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-5, foreach=False),
    "none": lambda parameters: None,
}


@dataclass(frozen=True)
class Step:
    """A training step: rows of `context_length` tokens, each predicting the next."""

    model: str
    context_length: int = 4096
    batch_size: int = 1
    loss: str = "logitless"
    gradient_checkpointing: bool = False
    offload_activations: bool = False
    mlp_tiles: int = 1
    attention: str = "auto"
    optimizer: str = "adamw"
    lora_rank: int = 0
    dtype: str = "bfloat16"
    memory_budget: int = DEFAULT_BUDGET

    def check(self) -> Step:
        """This step, once it can be built; raises OptionError."""
        for name, least in (("context_length", 2), ("batch_size", 1), ("mlp_tiles", 1), ("lora_rank", 0)):
            value = getattr(self, name)
            if not least <= value <= LARGEST:
                raise OptionError(f"--{name.replace('_', '-')} must be {least} to 2^63-1, got {value}")
        return self


def check_size(step: Step) -> None:
    """Raises OptionError where one tensor would have more bytes than a machine can count."""
    shape = shape_of(step.model)
    tokens = step.batch_size * step.context_length
    scores = shape.heads * step.context_length if step.attention == "eager" else 0
    if tokens * 4 * max(shape.vocab, shape.mlp, shape.query, scores) > LARGEST:
        raise OptionError(
            f"--batch-size × --context-length: {tokens:,} tokens make tensors of more than 2^63-1 bytes; "
            "give smaller sizes"
        )


def build(step: Step, device: str = "meta") -> nn.Module:
    """The model with its adapters, ready to train. Raises ConfigError where transformers cannot build it."""
    from transformers import AutoModelForCausalLM

    from ...models.long_context import lightened
    from ...models.nsa.layers import attach

    check_size(step)
    config = configuration(step.model)
    attention, sparse = step.attention, step.attention == "nsa"
    if attention == "auto":
        attention = "eager" if getattr(config, "attn_logit_softcapping", None) else None  # sdpa, where the model has it
    try:
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(
                config,
                dtype=getattr(torch, step.dtype),
                attn_implementation=None if sparse else attention,
                trust_remote_code=False,
            )
            model = attach(model) if sparse else model
            model = lightened(model, step.gradient_checkpointing, step.offload_activations, step.mlp_tiles)
            model = with_adapters(model, step.lora_rank) if step.lora_rank else model
    except LogitlessError:
        raise
    except Exception as error:  # each class of model fails in its own way
        raise ConfigError(f"model {step.model}: cannot be built: {in_one_line(error)}") from error
    return model.train()


def run(step: Step, model: nn.Module, device: torch.device) -> None:
    """Forward, loss, backward, optimizer step of a run under way: the optimizer has its state."""
    vocab = model.config.get_text_config().vocab_size  # pyright: ignore[reportAttributeAccessIssue, reportCallIssue]
    ids = torch.randint(0, vocab, (step.batch_size, step.context_length), device=device)
    optimizer = OPTIMIZERS[step.optimizer]([p for p in model.parameters() if p.requires_grad])
    if optimizer is not None:
        had_a_step(optimizer)
    if step.loss == "logitless":
        install(model, memory_budget=step.memory_budget)
    model(input_ids=ids, labels=ids.clone(), use_cache=False).loss.backward()
    if optimizer is not None:
        optimizer.step()


def had_a_step(optimizer: torch.optim.Optimizer) -> None:
    """Give an optimizer the state that every step but the first finds."""
    for group in optimizer.param_groups:
        for p in group["params"]:  # one by one: all gradients at once would be a peak
            p.grad = torch.zeros_like(p)
            optimizer.step()
            p.grad = None


def traced(step: Step, device: str = "gpu") -> Recording:
    """The step on fake tensors, as `device` ("gpu" or "cpu") would run it. Raises ConfigError, OptionError."""
    return recorded(step.check(), build(step), device)


def recorded(step: Step, model: nn.Module, device: str = "gpu") -> Recording:
    """The step of a model that was built for it. Raises ConfigError, OptionError."""
    try:
        with trace(model, device=device, batch=(step.batch_size, step.context_length)) as t:
            run(step, model, t.device)
    except LogitlessError:
        raise
    except Exception as error:  # whatever a model does to tensors without data
        raise ConfigError(f"model {step.model}: cannot be traced: {in_one_line(error)}") from error
    return t.recording


def both(step: Step, tell: Callable[[str], None] = lambda what: None) -> dict[str, Recording]:
    """The step with each loss, as a GPU would run it. tell: hears what is traced next."""
    found = {}
    for loss in LOSSES:
        tell(f"tracing a step, {loss} loss")
        found[loss] = traced(replace(step, loss=loss))
    return found
