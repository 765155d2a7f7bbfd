"""Plain data parallelism: every rank holds the whole model and its own microbatches; gradients are summed once a step.

Sums and not means: the loss is already divided by the labels of the whole step over all ranks. Lesson: 04_data_parallel.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

BUCKET_ELEMENTS = (
    2**24
)  # 64 MiB of fp32: large enough for bandwidth, small enough not to double the gradient memory


def world() -> tuple[int, int]:
    """(rank, number of ranks); (0, 1) when no process group was started."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def sum_over_ranks(tensor: Tensor) -> Tensor:
    """Sum ``tensor`` over all ranks, in place."""
    if world()[1] > 1:
        dist.all_reduce(tensor)
    return tensor


@torch.no_grad()
def sum_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Sum the gradients of ``parameters`` over all ranks, in flat buckets; one that got none on this rank counts as zero.

    Every rank must pass the same parameters in the same order.
    """
    if world()[1] == 1:
        return
    bucket: list[nn.Parameter] = []
    size = 0
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        if bucket and (size + parameter.numel() > BUCKET_ELEMENTS or parameter.dtype != bucket[0].dtype):
            _sum_bucket(bucket)
            bucket, size = [], 0
        bucket.append(parameter)
        size += parameter.numel()
    if bucket:
        _sum_bucket(bucket)


def _sum_bucket(bucket: list[nn.Parameter]) -> None:
    gradients = [p.grad for p in bucket if p.grad is not None]
    flat = torch.cat([g.reshape(-1) for g in gradients])
    dist.all_reduce(flat)
    for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients])):
        gradient.copy_(part.view_as(gradient))
