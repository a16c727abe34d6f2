"""`Layout`: which ranks of a run share sequences and matrices; `device_mesh`: the same as torch's DeviceMesh."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh

from ...errors import OptionError
from .config import TrainConfig

# The dimensions of the mesh, by the names that accelerate's data loaders and FSDP2 look for.
DATA, CONTEXT, TENSOR, WEIGHTS = "dp_shard", "cp", "tp", "dp_shard_cp"


@dataclass(frozen=True)
class Layout:
    """The ranks of a run by what they divide: rank = (data rank · context + context rank) · tensor + tensor rank.

    data: groups of ranks, each with sequences of its own; context: ranks that share each sequence, a part of it each;
    tensor: ranks that share each matrix, and see the same tokens. fsdp: whether FSDP2 divides weights, gradients and
    optimizer state among the ranks that hold the same part of each matrix.
    """

    data: int = 1
    context: int = 1
    tensor: int = 1
    fsdp: bool = False

    @classmethod
    def of(cls, config: TrainConfig, ranks: int) -> Layout:
        """The layout of `ranks` ranks that `config` asks for. Raises OptionError where they cannot be divided so."""
        context, tensor = config.context_parallel, config.tensor_parallel
        asked = " and ".join(
            f"--{name} {n}" for name, n in (("tensor-parallel", tensor), ("context-parallel", context)) if n > 1
        )
        if ranks % (context * tensor):
            raise OptionError(
                f"{asked}: expected a number of ranks that {context * tensor} divides, got {ranks}; launch with "
                f"torchrun --nproc-per-node {context * tensor}, or ask for less"
            )
        found = cls(ranks // (context * tensor), context, tensor, config.sharding == "fsdp2")
        if tensor > 1 and found.weights > 1 and not found.fsdp:
            raise OptionError(
                f"{asked} on {ranks} ranks: {found.weights} ranks hold the same part of each matrix, which needs "
                f"--sharding fsdp2; or launch {tensor} ranks"
            )
        return found

    @property
    def ranks(self) -> int:
        return self.data * self.context * self.tensor

    @property
    def weights(self) -> int:
        """Ranks that hold the same part of each matrix, and add up their gradients."""
        return self.data * self.context

    @property
    def sharing(self) -> int:
        """Ranks that get the same sequences from the data loader."""
        return self.context * self.tensor

    @property
    def whole(self) -> bool:
        """Whether every rank holds all weights."""
        return self.tensor == 1 and not self.fsdp

    @property
    def shares(self) -> bool:
        """Whether ranks share weights or sequences, and a checkpoint is written by all of them."""
        return not self.whole or self.sharing > 1


def device_mesh(layout: Layout, device: str, seconds: float) -> Any:
    """The ranks as a DeviceMesh with the dimensions of more than one; None where the data alone is divided.

    mesh["cp"].get_group(), mesh.get_local_rank("cp"): the ranks that share this one's sequences, and its part. WEIGHTS
    is the data's and the context's dimension as one. device: cpu or cuda; seconds: how long a rank waits for others.
    All ranks call it, once a run.
    """
    if layout.sharing == 1:
        return None
    sizes = {DATA: layout.data, CONTEXT: layout.context, TENSOR: layout.tensor}
    sizes = {name: size for name, size in sizes.items() if size > 1}
    ranks = torch.arange(layout.ranks).view(*sizes.values())
    groups = [
        dist.new_subgroups_by_enumeration(
            ranks.movedim(d, -1).reshape(-1, size).tolist(), timeout=timedelta(seconds=seconds)
        )[0]
        for d, size in enumerate(sizes.values())
    ]
    whole: Any = groups if len(groups) > 1 else groups[0]
    mesh: Any = DeviceMesh.from_group(whole, device, mesh=ranks, mesh_dim_names=tuple(sizes))
    of_weights = tuple(name for name in sizes if name != TENSOR)
    if of_weights:
        mesh[of_weights]._flatten(WEIGHTS)
        wait: Any = c10d._set_pg_timeout  # pyright: ignore[reportPrivateImportUsage]
        wait(timedelta(seconds=seconds), mesh[WEIGHTS].get_group())
    return mesh
