"""How many tokens count, on all ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..errors import DtypeError
from .ranks import Ranks
from .shard import process_group

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


def count_tokens(
    labels: Tensor,  # (...)
    group: ProcessGroup | DeviceMesh | None = None,
    *,
    dim: str | None = None,
    ignore_index: int = -100,
) -> Tensor:  # () int64
    """How many labels of all ranks of a group count: what a loss over sequence or batch shards is divided by.

    Dense equivalent:

        (torch.cat(all ranks' labels) != ignore_index).sum().clamp(min=1)

    With context parallelism each rank has a part of every sequence, with data parallelism some of the sequences, and
    mostly unlike numbers of tokens that count; a mean of means weighs them wrong. Each rank's share of the loss is

        linear_cross_entropy(hidden, head, labels, denominator=count_tokens(labels, group))
        token_loss(loss_fn, hidden, head, labels, reduction="sum") / count_tokens(labels, group)

    and the shares add up to the loss of the whole batch. An engine that averages gradients over D ranks (DDP, FSDP2)
    wants the shares times D. labels: shifted before they are sharded; group: a process group, or a mesh with `dim` as
    `VocabShard` takes them; None counts these labels alone. At least 1, so that a mean over no token is 0. One
    collective of a number. Raises DtypeError, ConfigError, RankError.
    """
    if not isinstance(labels, Tensor) or labels.is_floating_point():
        got: Any = labels.dtype if isinstance(labels, Tensor) else type(labels).__name__
        raise DtypeError(f"labels: expected integer ids, got {got}")
    total = (labels != ignore_index).sum()
    if group is not None:
        Ranks(process_group("count_tokens", group, dim)).add_(total)
    return total.clamp(min=1)
