"""What `test_deepspeed.py` runs on each of two ranks: ZeRO-3's gradients beside the single-process ones.

torchrun --nproc-per-node 2 -m tests.support.integrations.deepspeed_ranks RESULTS.json
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_grad
from peft import LoraConfig, get_peft_model
from torch import Tensor

import logitless
from logitless.integrations.trl.rewards import SelfCertaintyReward
from tests.support.integrations.launching import leave
from tests.support.integrations.ranks import ROWS, half
from tests.support.integrations.tiny import TINY, batch_for
from tests.support.integrations.trl.ranks import KINDS, fused, loss_of

Loss = Callable[[Any, dict[str, Tensor], int], Tensor]  # of a model, a part of a batch, and the number of parts

SETTINGS = {
    "train_micro_batch_size_per_gpu": ROWS // 2,
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    "zero_force_ds_cpu_optimizer": False,
    "zero_allow_untested_optimizer": True,
}


deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # would be compiled, for minutes; gloo does


def build(adapted: bool) -> Any:
    model = TINY["llama"].build()
    if not adapted:
        return model
    config = LoraConfig(r=2, target_modules=["q_proj", "lm_head"], init_lora_weights=False, task_type="CAUSAL_LM")
    torch.manual_seed(3)
    return get_peft_model(model, config)


def compared(own: Any, model: Any, batch: dict[str, Tensor], loss: Loss) -> dict[str, Any]:
    """Gradients of the sharded model, each rank on its half of the batch, beside those of `own` on all of it."""
    loss(own, batch, 1).backward()
    trained = [p for p in model.parameters() if p.requires_grad]
    engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.SGD(trained, 0.0), config=SETTINGS)
    with torch.no_grad():
        hidden = logitless.hidden_states(engine, half(batch))
    difference = (hidden - half({"h": logitless.hidden_states(own, batch)})["h"]).abs().max()
    for step in range(2):  # the second meets what the first one left sharded
        engine.backward(loss(engine, half(batch), dist.get_world_size()))
        if step == 0:
            engine.step()  # of length 0
    errors = {}
    for (name, exact), parameter in zip(own.named_parameters(), model.parameters(), strict=True):
        if exact.grad is not None:
            found = safe_get_full_grad(parameter)
            errors[name] = float((found - exact.grad).abs().max() / exact.grad.abs().max())
    return {"errors": errors, "hidden": float(difference)}


def installed(adapted: bool, batch: dict[str, Tensor]) -> dict[str, Any]:
    """The loss of an installed model, beside transformers' own."""
    items = int((batch["labels"][:, 1:] != -100).sum())

    def loss(model: Any, part: dict[str, Tensor], ranks: int) -> Tensor:
        output = model(**part, num_items_in_batch=items / ranks)
        assert (output.logits is None) == (ranks > 1)
        return output.loss

    model = build(adapted)
    logitless.install(model)
    return compared(build(adapted), model, batch, loss)


def trl_forward(kind: str, batch: dict[str, Tensor]) -> dict[str, Any]:
    """The forward that TRL's trainers call, at the price that the kind of loss allows."""
    own, model = fused(kind).float(), fused(kind).float()
    return compared(own, model, batch, lambda m, part, ranks: ranks * loss_of(kind, m, part))


def reward() -> dict[str, Any]:
    """Self-certainty of each rank's own rows under the sharded policy, beside the whole one's."""
    own, model, rank = build(True).eval(), build(True).eval(), dist.get_rank()
    trained = [p for p in model.parameters() if p.requires_grad]
    engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.SGD(trained, 0.0), config=SETTINGS)
    rows = {"prompt_token_ids": [[5, 9, 17 + rank], [3, 4]], "completion_ids": [[7, 7, 90, 2], [11, 25 + rank]]}
    scores = [SelfCertaintyReward(micro_batch=1).bind(policy)(**rows) for policy in (own, engine)]
    return {"found": scores[1], "expected": scores[0]}


def main(place: str) -> None:
    deepspeed.init_distributed("gloo")
    torch.set_num_threads(1)
    batch = batch_for("", rows=ROWS)
    batch["labels"][0] = -100
    results = {name: installed(adapted, batch) for name, adapted in (("plain", False), ("adapted", True))}
    results |= {f"trl, {kind}": trl_forward(kind, batch) for kind in KINDS}
    results["reward"] = reward()
    if dist.get_rank() == 0:
        Path(place).write_text(json.dumps(results))
    leave()


if __name__ == "__main__":
    main(sys.argv[1])
