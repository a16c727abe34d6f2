"""What `test_multi_token.py` runs on two ranks: Medusa's heads under FSDP2, each rank with a row of the batch.

torchrun --nproc-per-node 2 -m tests.support.integrations.multi_token_ranks
"""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, LlamaConfig

import logitless
from logitless.errors import ConfigError
from logitless.integrations.transformers.multi_token import MedusaHeads
from tests.support.integrations.launching import leave

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}


def installed():
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=97, initializer_range=0.3, **SIZES)).double()
    heads = MedusaHeads(model, 2)
    for block in heads.blocks:
        torch.nn.init.normal_(block.weight, std=0.2)
    logitless.install(model, multi_token=heads)
    return model


def main() -> None:
    dist.init_process_group("gloo")
    mine, mesh = slice(dist.get_rank(), dist.get_rank() + 1), init_device_mesh("cpu", (2,))
    ids = torch.randint(97, (2, 12), generator=torch.Generator().manual_seed(1))
    alone = installed()
    alone(ids, labels=ids).loss.backward()
    for units in ([], ["lm_head"]):  # the head in the root's unit, or a unit of its own
        model = installed()
        for unit in (*model.model.layers, *(getattr(model, name) for name in units), model):
            fully_shard(unit, mesh=mesh)
        model(ids[mine], labels=ids[mine]).loss.backward()
        for (name, x), (_, y) in zip(model.named_parameters(), alone.named_parameters(), strict=True):
            torch.testing.assert_close(x.grad.full_tensor(), y.grad, msg=lambda text, name=name: f"{name}: {text}")
    with pytest.raises(ConfigError, match="make these before it is sharded"):
        MedusaHeads(model, 2)
    leave()


if __name__ == "__main__":
    main()
