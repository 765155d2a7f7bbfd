"""Small helpers over torch.distributed. Lesson: 04_data_parallel."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

# torch 2.13 gave these two new names and warns about the old ones.
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def world() -> tuple[int, int]:
    """(rank, number of ranks); (0, 1) when no process group was started."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def sum_over_ranks(tensor: Tensor) -> Tensor:
    """Sum ``tensor`` over all ranks, in place; works with and without a process group."""
    if world()[1] > 1:
        dist.all_reduce(tensor)
    return tensor


def start_reduce_scatter(shard: Tensor, whole: Tensor, group: dist.ProcessGroup | None) -> dist.Work:
    """Begin summing ``whole [n L]`` over the group's n ranks, each keeping its ``shard [L]``; ``shard`` may lie in ``whole``."""
    return _reduce_scatter(shard, whole, group=group, async_op=True)


def start_all_gather(whole: Tensor, shard: Tensor, group: dist.ProcessGroup | None) -> dist.Work:
    """Begin collecting every rank's ``shard [L]`` into ``whole [n L]``; ``shard`` may lie in ``whole``."""
    return _all_gather(whole, shard, group=group, async_op=True)
