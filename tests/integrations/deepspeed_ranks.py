"""What `test_deepspeed.py` runs on each of two ranks: ZeRO-3's gradients beside the single-process ones.

torchrun --nproc-per-node 2 -m tests.integrations.deepspeed_ranks RESULTS.json
"""

import json
import sys
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_grad

import logitless
from tests.integrations.ranks import ROWS, half
from tests.integrations.tiny import TINY, batch_for

SETTINGS = {
    "train_micro_batch_size_per_gpu": ROWS // 2,
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    "zero_force_ds_cpu_optimizer": False,
    "zero_allow_untested_optimizer": True,
}


deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # would be compiled, for minutes; gloo does


def main(place: str) -> None:
    deepspeed.init_distributed("gloo")
    torch.set_num_threads(1)
    batch = batch_for("", rows=ROWS)
    batch["labels"][0] = -100
    items = int((batch["labels"][:, 1:] != -100).sum())
    own = TINY["llama"].build()
    own(**batch, num_items_in_batch=items).loss.backward()
    model = TINY["llama"].build()
    logitless.install(model)
    engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), 0.0), config=SETTINGS)
    with torch.no_grad():
        hidden = logitless.hidden_states(engine, half(batch))
    difference = (hidden - half({"h": logitless.hidden_states(own, batch)})["h"]).abs().max()
    output = engine(**half(batch), num_items_in_batch=items / dist.get_world_size())
    engine.backward(output.loss)
    errors = {}
    for (name, exact), parameter in zip(own.named_parameters(), model.parameters(), strict=True):
        found = safe_get_full_grad(parameter)
        errors[name] = float((found - exact.grad).abs().max() / exact.grad.abs().max())
    if dist.get_rank() == 0:
        results = {"errors": errors, "hidden": float(difference), "no_logits": output.logits is None}
        Path(place).write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
