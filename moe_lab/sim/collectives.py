"""What each collective gives every rank. Lesson: 04_data_parallel."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from moe_lab.errors import ConfigError


def check_alike(tensors: Sequence[Tensor]) -> None:
    """:class:`ConfigError` unless there is at least one rank and all hold the same shape and type."""
    if not tensors:
        raise ConfigError("a collective needs the tensors of at least 1 rank, but got an empty list")
    for rank, tensor in enumerate(tensors):
        if tensor.shape != tensors[0].shape or tensor.dtype != tensors[0].dtype:
            raise ConfigError(
                f"rank {rank} holds {tuple(tensor.shape)} {tensor.dtype}, but rank 0 holds {tuple(tensors[0].shape)} "
                f"{tensors[0].dtype}: all ranks of a collective hold the same shape and type"
            )


def check_divides(length: int, ranks: int) -> None:
    """:class:`ConfigError` unless ``ranks`` equal shards make up ``length``."""
    if length % ranks:
        raise ConfigError(f"{ranks} ranks do not divide the {length} rows of a tensor: pad it first")


def _sum(tensors: Sequence[Tensor]) -> Tensor:
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        total += tensor
    return total


def all_reduce(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Every rank gets the sum over ranks."""
    check_alike(tensors)
    total = _sum(tensors)
    return [total.clone() for _ in tensors]


def reduce_scatter(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Rank r gets the r-th of n equal parts, along the first dimension, of the sum over ranks."""
    check_alike(tensors)
    check_divides(tensors[0].shape[0], len(tensors))
    return [part.clone() for part in _sum(tensors).chunk(len(tensors))]


def all_gather(shards: Sequence[Tensor]) -> list[Tensor]:
    """Every rank gets all shards in rank order, joined along the first dimension."""
    check_alike(shards)
    return [torch.cat(list(shards)) for _ in shards]


def broadcast(tensors: Sequence[Tensor], source: int = 0) -> list[Tensor]:
    """Every rank gets what rank ``source`` holds."""
    check_alike(tensors)
    if not 0 <= source < len(tensors):
        raise ConfigError(f"source is rank {source}, but the ranks are 0 to {len(tensors) - 1}")
    return [tensors[source].clone() for _ in tensors]


def all_to_all(parts: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
    """Rank s sends ``parts[s][t]``, of any length, to rank t; rank t gets a list by sender."""
    for rank, own in enumerate(parts):
        if len(own) != len(parts):
            raise ConfigError(f"rank {rank} has parts for {len(own)} ranks, but there are {len(parts)}")
    return [[parts[source][target].clone() for source in range(len(parts))] for target in range(len(parts))]


def in_groups(
    collective: Callable[[Sequence[Tensor]], list[Tensor]],
    tensors: Sequence[Tensor],
    groups: Sequence[Sequence[int]],
) -> list[Tensor]:
    """``collective`` inside each of ``groups`` (lists of ranks): every rank gets its own group's result.

    Each rank must be in exactly one group; :class:`ConfigError` otherwise.
    """
    if sorted(rank for group in groups for rank in group) != list(range(len(tensors))):
        raise ConfigError(
            f"groups {[list(g) for g in groups]} must hold each of {len(tensors)} ranks exactly once"
        )
    results = list(tensors)
    for group in groups:
        for rank, result in zip(group, collective([tensors[rank] for rank in group])):
            results[rank] = result
    return results
