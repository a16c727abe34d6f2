"""Run by torchrun: a wrapped policy's self-certainty on two ranks, each with rows of its own."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from logitless.integrations.trl.rewards import SelfCertaintyReward
from tests.support.integrations.launching import leave
from tests.support.workbench.micro import micro_model

KINDS = ("ddp", "root", "grouped", "own")


def wrapped(model, kind):
    """DDP, or FSDP2 with the head in the root, grouped with the norm, or a unit of its own."""
    if kind == "ddp":
        return DistributedDataParallel(model)
    mesh = init_device_mesh("cpu", (2,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    if kind == "own":
        fully_shard(model.lm_head, mesh=mesh)
    elif kind == "grouped":
        fully_shard([model.model.norm, model.lm_head], mesh=mesh)
    return fully_shard(model, mesh=mesh)


def main():
    dist.init_process_group("gloo")
    prompts = [[5, 9, 17], [3, 4]] if dist.get_rank() else [[44, 2, 8, 100], [7]]
    completions = [[7, 7, 90, 2], [11, 250, 6]] if dist.get_rank() else [[30, 31], [5, 99, 41, 2, 8]]

    def scores(model):
        reward = SelfCertaintyReward(micro_batch=1).bind(model)
        return torch.tensor(reward(prompt_token_ids=prompts, completion_ids=completions))

    for kind in KINDS:
        model = micro_model(tie_word_embeddings=False)
        wanted = scores(model)
        policy = wrapped(model, kind)
        for _ in range(2):
            torch.testing.assert_close(scores(policy), wanted, rtol=1e-5, atol=1e-6, msg=lambda m, k=kind: f"{k}: {m}")
    leave()


if __name__ == "__main__":
    main()
