"""What `test_distributed.py` runs on two ranks: the fused forward's gradients in every wrapping, for each price.

torchrun --nproc-per-node 2 -m tests.support.integrations.trl.ranks RESULTS.json
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from trl.trainer.utils import add_fused_lm_head

from logitless.integrations.trl.contract import settings_of
from logitless.integrations.trl.forward import Fused
from logitless.integrations.trl.scores import Wanted
from tests.support.integrations.launching import leave
from tests.support.integrations.ranks import ROWS, build, errors, half, shard
from tests.support.integrations.tiny import batch_for

# Of the losses: whether all tokens weigh the same, and whether the head is trained.
KINDS = {"equal": (True, True), "any": (False, True), "frozen": (False, False)}


def fused(kind: str) -> Any:
    equal, trained = KINDS[kind]
    model = build()
    model.lm_head.requires_grad_(trained)
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    wanted = Wanted(("logprob", "entropy"), only_logprob=True, equal_weights=equal)
    head = Fused(model.forward, settings_of(model.forward), wanted, on=True)
    model.forward = head.method(model)
    return model


def loss_of(kind: str, model: Any, batch: dict[str, Tensor]) -> Tensor:
    """A sum over tokens, with weights of their own unless they are to be equal."""
    logps = model(**batch, fused_lm_head=True).log_probs
    weights = torch.ones_like(logps) if KINDS[kind][0] else batch["input_ids"][:, 1:].double().sin()
    return -(weights * logps).sum()


def found(kind: str, wrapping: str, batch: dict[str, Tensor]) -> dict[str, float]:
    exact = fused(kind)
    loss_of(kind, exact, batch).backward()
    grads = {name: p.grad for name, p in exact.named_parameters() if p.grad is not None}
    model = fused(kind)
    model = nn.parallel.DistributedDataParallel(model) if wrapping == "ddp" else shard(model, wrapping)
    for _ in range(2):  # the second step meets what the first one left sharded
        model.zero_grad(set_to_none=True)
        # ranks' gradients are averaged
        (dist.get_world_size() * loss_of(kind, model, half(batch))).backward()
    return errors_of(model, grads)


def errors_of(model: Any, exact: dict[str, Tensor]) -> dict[str, float]:
    frozen = [p for p in model.parameters() if p.grad is None]
    for p in frozen:
        p.grad = torch.zeros_like(p)
    return errors(model, exact)


def main(place: str) -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    batch = batch_for("", rows=ROWS)
    batch["labels"][0] = -100  # ranks with unlike numbers of tokens that count
    results = {
        f"{kind}, {wrapping}": found(kind, wrapping, {name: x.clone() for name, x in batch.items()})
        for kind in KINDS
        for wrapping in ("ddp", "root", "norm and head", "head")
    }
    if dist.get_rank() == 0:
        Path(place).write_text(json.dumps(results))
    leave()


if __name__ == "__main__":
    main(sys.argv[1])
