"""`VocabShard`: which rows of a head this rank holds. A DTensor's own placement says it as well."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...algebra.options import whole_from
from ...errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class Layout:
    """Which existing rows every rank holds."""

    offsets: tuple[int, ...]
    rows: tuple[int, ...]

    @property
    def widest(self) -> int:
        return max(1, *self.rows)

    @property
    def holding(self) -> list[int]:
        """The ranks that hold rows, in the order of these: of equal logits the lower id comes first."""
        return sorted((r for r, n in enumerate(self.rows) if n), key=lambda r: self.offsets[r])


@dataclass(frozen=True, eq=False)
class VocabShard:
    """The rows that this rank holds of a head whose vocabulary is split over the ranks of a group.

    Dense equivalent:

        weight = torch.cat(all ranks' weights, in the order of their offsets)  # (total, H)

    group: a process group, or a device mesh with `dim`, the name of the mesh's dimension that the rows are split
    over (not needed where there is one). offset: the vocabulary id of this rank's first row; total: the rows of all
    ranks, padding included. Shards may differ in size or be empty; together they hold every row once, which is
    checked when the ranks first meet in a call. Raises ConfigError, OptionError.
    """

    group: ProcessGroup | DeviceMesh
    offset: int
    total: int
    dim: str | None = None
    process_group: ProcessGroup = field(init=False, repr=False)
    layout: Layout | None = field(default=None, init=False, repr=False)  # of the call that the ranks have agreed on

    def __post_init__(self) -> None:
        for name, x in (("offset", self.offset), ("total", self.total)):
            object.__setattr__(self, name, whole_from(f"VocabShard: {name}", x, 0))
        object.__setattr__(self, "process_group", process_group("VocabShard", self.group, self.dim))

    def agreed(self, layout: Layout) -> VocabShard:
        """The shard in a call of ranks that hold these rows; this one remembers them for `explain`."""
        other = copy(self)
        for shard in (self, other):
            object.__setattr__(shard, "layout", layout)
        return other

    def __deepcopy__(self, memo: dict[int, Any]) -> VocabShard:
        """The same rows of the same group: a process group cannot be copied."""
        return copy(self)

    @property
    def name(self) -> str:
        """The process group's name, by which it is found where a group cannot go."""
        return self.process_group.group_name


def group_named(name: str) -> Any:
    """The process group that has this name, which goes where a group cannot."""
    from torch.distributed import distributed_c10d as c10d

    find: Any = c10d._resolve_process_group  # pyright: ignore[reportPrivateImportUsage]
    return find(name)


def process_group(what: str, group: Any, dim: str | None) -> Any:
    """The process group that `group` is, or that a mesh has along `dim`. Raises ConfigError."""
    if dim is None and getattr(group, "group_name", None) is not None:  # what torch 2.11 can ask in a compiled caller
        return group
    if dim is None and not hasattr(group, "mesh_dim_names"):
        got = type(group).__name__
        raise ConfigError(f"{what}: group must be a process group that this rank is in, or a mesh; got {got}")
    names = getattr(group, "mesh_dim_names", None) or ()
    if dim is not None and dim not in names:
        found = ", ".join(map(repr, names)) or "no named dimension"
        raise ConfigError(f"{what}: expected a mesh with a dimension {dim!r}, got one with {found}")
    if dim is None and group.ndim != 1:
        raise ConfigError(f"{what}: expected dim, one of the mesh's {group.ndim} dimensions {tuple(names)}")
    return group.get_group(dim)


def is_dtensor(x: object) -> bool:
    return type(x).__name__ == "DTensor" and hasattr(x, "placements")


def check_plain(name: str, x: Tensor, matrix: bool = True) -> None:
    """Raise ConfigError where a tensor is not all here as plain numbers: sharded, sparse or quantised."""
    flat = matrix and x.dim() == 1 and hasattr(x, "_fsdp_flattened")  # FSDP1's, outside of forward
    if flat or is_dtensor(x) or (x.numel() == 0 and hasattr(x, "ds_numel")):
        raise ConfigError(
            f"{name} is sharded (FSDP, ZeRO-3 or tensor parallel), expected it whole; call the pass inside the head "
            "module's own forward, as logitless.install does, or gather the parameter first"
        )
    if x.layout is not torch.strided:
        kind = str(x.layout).removeprefix("torch.")
        raise ConfigError(f"{name} is {kind}, expected a dense tensor; pass x.to_dense()")
    if hasattr(type(x), "__tensor_flatten__"):
        raise ConfigError(f"{name} is a {type(x).__name__}, expected a plain tensor; dequantise it first")


def local_part(x: Any) -> Tensor:
    """What a DTensor has here; it leads to the DTensor's gradient in whatever mode the head is made."""
    with torch.enable_grad():
        return x.to_local()


def localised(name: str, x: Any) -> tuple[Tensor, VocabShard]:
    """A DTensor's local rows, differentiable, and which they are. Raises ConfigError."""
    from torch.distributed import get_rank, get_world_size

    placements, mesh = x.placements, x.device_mesh
    if len(placements) != 1 or type(placements[0]).__name__ != "Shard" or placements[0].dim != 0:
        raise ConfigError(
            f"{name} is sharded as {tuple(placements)} over a mesh of {mesh.ndim} dimensions, expected Shard(0) over "
            "one; call the pass inside the head module's own forward, as logitless.install does, or redistribute it"
        )
    group = mesh.get_group()
    total, each = x.shape[0], -(-x.shape[0] // get_world_size(group))  # as torch.chunk splits
    return local_part(x), VocabShard(group, min(total, each * get_rank(group)), total)
