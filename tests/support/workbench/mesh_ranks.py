"""What `test_mesh.py` runs on every rank: how long each group of a mesh waits."""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from logitless.workbench.sft.mesh import CONTEXT, DATA, TENSOR, WEIGHTS, Layout, device_mesh
from tests.support.vocab.sharding import run


def waits(_: Any) -> None:
    for layout, names in (
        (Layout(context=2, tensor=2, fsdp=True), (CONTEXT, TENSOR, WEIGHTS)),
        (Layout(data=2, tensor=2, fsdp=True), (DATA, TENSOR, WEIGHTS)),
        (Layout(data=2, context=2, fsdp=True), (DATA, CONTEXT)),  # WEIGHTS is every rank: the run's own group
    ):
        mesh = device_mesh(layout, "cpu", 77)
        for name in names:
            group: Any = mesh[name].get_group()
            assert dist.get_world_size(group) == 2
            assert group._get_backend(torch.device("cpu")).options._timeout == timedelta(seconds=77), name
    dist.barrier()  # none may go while another still makes groups


if __name__ == "__main__":
    run({}, last=waits)
