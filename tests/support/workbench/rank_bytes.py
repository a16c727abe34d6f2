"""What `test_ranks.py` runs on each of two ranks: the bytes that a training step leaves, by what they are for.

torchrun --nproc-per-node 2 -m tests.support.workbench.rank_bytes RESULTS.json
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import Qwen3Config, Qwen3ForCausalLM

import logitless
from tests.support.integrations.launching import leave

CONFIG: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 4003,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "tie_word_embeddings": False,
}
ROWS, LENGTH = 2, 24


def local_bytes(tensors: Any) -> int:
    """Of the storages here, each once."""
    local = [getattr(x, "_local_tensor", x) for x in tensors if isinstance(x, Tensor)]
    return sum({x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in local}.values())


def wrapped(sharding: str) -> tuple[nn.Module, nn.Module]:
    """(what is called, whose parameters are trained)"""
    torch.manual_seed(0)
    model: Any = Qwen3ForCausalLM(Qwen3Config(**CONFIG)).to(torch.bfloat16)
    logitless.install(model)
    if sharding == "ddp":
        return nn.parallel.DistributedDataParallel(model), model
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard([model.model.norm, model.lm_head], mesh=mesh)
    return fully_shard(model, mesh=mesh), model


def measured(sharding: str) -> dict[str, int]:
    called, model = wrapped(sharding)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ids = torch.randint(CONFIG["vocab_size"], (ROWS, LENGTH))
    called(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    optimizer.step()
    parameters = list(model.parameters())
    state = [x for each in optimizer.state.values() for name, x in each.items() if name != "step"]
    return {
        "parameters": local_bytes(parameters),
        "gradients": local_bytes([p.grad for p in parameters]),
        "optimizer state": local_bytes(state),
    }


def main(place: str) -> None:
    dist.init_process_group("gloo")
    results: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(results, {sharding: measured(sharding) for sharding in ("ddp", "fsdp2")})
    if dist.get_rank() == 0:
        Path(place).write_text(json.dumps(results))
    leave()


if __name__ == "__main__":
    main(sys.argv[1])
