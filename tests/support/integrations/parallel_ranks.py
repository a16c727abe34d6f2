"""What `test_parallel.py` runs on two ranks: transformers' tensor-parallel plan, and FSDP2's collectives.

torchrun --nproc-per-node 2 -m tests.support.integrations.parallel_ranks RESULTS.json FOLDER_OF_MODELS
"""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor.debug import CommDebugMode
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

import logitless
from logitless.errors import RankError
from tests.support.integrations.launching import leave
from tests.support.integrations.ranks import build, errors, expected, half, shard, step
from tests.support.integrations.tiny import batch_for


def tensor_parallel(place: str, batch: dict[str, Tensor]) -> dict[str, Any]:
    """Loss and gradients of a model that transformers splits, beside those of one process; and tokens of both."""
    alone = AutoModelForCausalLM.from_pretrained(place, dtype=torch.float64)
    dense = alone(**batch).loss
    dense.backward()
    config = DistributedConfig(tp_size=2, tp_plan="auto")
    model = AutoModelForCausalLM.from_pretrained(place, dtype=torch.float64, distributed_config=config)
    logitless.install(model)
    output = model(**batch)
    output.loss.backward()
    entropies, generated = [], []
    for each in (model, alone):
        head = logitless.LMHead.of(each)
        hidden = logitless.hidden_states(each, {"input_ids": batch["input_ids"]}).detach()
        entropies.append(logitless.token_stats(hidden, head, batch["labels"], want=("entropy",)).entropy)
        generated.append(each.generate(batch["input_ids"], max_new_tokens=4, do_sample=False))
    head = logitless.LMHead.of(model)
    torch.manual_seed(dist.get_rank())
    with pytest.raises(RankError) as unlike:
        logitless.generate(model, {"input_ids": batch["input_ids"]}, max_new_tokens=2, do_sample=True)
    return {
        "loss": [output.loss.item(), dense.item()],
        "head": [type(model.lm_head.weight).__name__, head.weight.shape[0], head.rows, output.logits is None],
        "entropy": (entropies[0] - entropies[1]).abs().max().item(),
        "generated": torch.equal(*generated),
        "unlike seeds": str(unlike.value),
        "errors": errors(model, {name: p.grad for name, p in alone.named_parameters()}),
    }


def collectives(batch: dict[str, Tensor], how: str) -> dict[str, Any]:
    """How often a training step of a sharded model gathers parameters and reduces gradients; and the gradients."""
    model = shard(build(), how.split(",")[0])
    if how.endswith("once"):
        model.lm_head.set_unshard_in_backward(False)  # the head's gradient is formed in its forward
    logitless.install(model)
    mode = CommDebugMode()
    for _ in range(2):  # the first step sets hooks up
        with mode:
            model(**half(batch)).loss.backward()
    counts = {str(name).split(".")[-1]: n for name, n in mode.get_comm_counts().items()}
    items = int((batch["labels"][:, 1:] != -100).sum())
    loss, exact = expected(batch, items)
    ops = {"gathers": "_allgather_base_", "reductions": "_reduce_scatter_base_"}
    return {
        "loss": [step(model, batch, items), loss],
        "errors": errors(model, exact),
        **{name: counts.get(op, 0) for name, op in ops.items()},
    }


def main(place: str, models: str) -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    batch = batch_for("", rows=4)
    results = {name: tensor_parallel(f"{models}/{name}", batch) for name in ("own head", "tied head")}
    for how in ("root", "norm and head", "head", "head, once"):
        results[f"collectives, {how}"] = collectives(batch, how)
    if dist.get_rank() == 0:
        Path(place).write_text(json.dumps(results))
    leave()


if __name__ == "__main__":
    main(*sys.argv[1:])
