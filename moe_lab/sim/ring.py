"""All-reduce as a ring of neighbours does it, one step at a time, with its bytes counted.

n ranks cut their tensor into n chunks. For n - 1 steps each rank passes a chunk to its right neighbour, who adds it to its
own: then rank r holds the whole sum of chunk r (a reduce-scatter). For n - 1 more steps finished chunks go around (an
all-gather). Each rank sends n - 1 chunks in either half, 2 (n - 1) / n of the tensor in all: almost the same for 4 ranks
and for 400. Source: Patarasu and Yuan 2009, *Bandwidth optimal all-reduce algorithms*. Lesson: 04_data_parallel.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_lab.errors import ConfigError
from moe_lab.sim.collectives import check_alike, check_divides


@dataclass(frozen=True)
class Transfer:
    """One message: from rank ``source`` to rank ``target``, and its size in bytes."""

    source: int
    target: int
    bytes: int


class Wire:
    """Carries tensors between ``ranks`` simulated ranks and keeps a list of :class:`Transfer` in ``transfers``."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.transfers: list[Transfer] = []

    def send(self, source: int, target: int, tensor: Tensor) -> Tensor:
        """What ``target`` receives: a copy of ``tensor``. A rank that sends to itself is a :class:`ConfigError`."""
        if source == target or not (0 <= source < self.ranks and 0 <= target < self.ranks):
            raise ConfigError(f"rank {source} cannot send to rank {target}: {self.ranks} different ranks")
        self.transfers.append(Transfer(source, target, tensor.numel() * tensor.element_size()))
        return tensor.clone()

    def sent(self, rank: int) -> int:
        """Bytes that ``rank`` has sent."""
        return sum(t.bytes for t in self.transfers if t.source == rank)

    def received(self, rank: int) -> int:
        """Bytes that ``rank`` has received."""
        return sum(t.bytes for t in self.transfers if t.target == rank)


def _chunks(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    check_alike(tensors)
    check_divides(tensors[0].shape[0], len(tensors))
    return [[chunk.clone() for chunk in tensor.chunk(len(tensors))] for tensor in tensors]


def _reduce_scatter_step(chunks: list[list[Tensor]], step: int, wire: Wire) -> None:
    """Rank r passes chunk r - 1 - step on, and its right neighbour adds it; after n - 1 steps rank r owns chunk r."""
    n = len(chunks)
    arriving = [wire.send(r, (r + 1) % n, chunks[r][(r - 1 - step) % n]) for r in range(n)]
    for rank in range(n):
        index = (rank - 2 - step) % n
        chunks[rank][index] = chunks[rank][index] + arriving[rank - 1]


def _all_gather_step(chunks: list[list[Tensor]], step: int, wire: Wire) -> None:
    """Rank r passes the finished chunk r - step on; after n - 1 steps every rank has all."""
    n = len(chunks)
    arriving = [wire.send(r, (r + 1) % n, chunks[r][(r - step) % n]) for r in range(n)]
    for rank in range(n):
        chunks[rank][(rank - 1 - step) % n] = arriving[rank - 1]


def ring_states(tensors: Sequence[Tensor], wire: Wire) -> Iterator[list[list[Tensor]]]:
    """``[rank][chunk]`` at the start and after each of the 2 (n - 1) steps of a ring all-reduce, to look at.

    All ranks hold the same shape, whose first dimension n divides; :class:`ConfigError` otherwise.
    """
    chunks = _chunks(tensors)
    yield [list(row) for row in chunks]
    for one_step in (_reduce_scatter_step, _all_gather_step):
        for step in range(len(chunks) - 1):
            one_step(chunks, step, wire)
            yield [list(row) for row in chunks]


def ring_reduce_scatter(tensors: Sequence[Tensor], wire: Wire) -> list[Tensor]:
    """Rank r gets part r of the sum, like :func:`~moe_lab.sim.collectives.reduce_scatter`, in n - 1 steps."""
    chunks = _chunks(tensors)
    for step in range(len(chunks) - 1):
        _reduce_scatter_step(chunks, step, wire)
    return [own[rank] for rank, own in enumerate(chunks)]


def ring_all_gather(shards: Sequence[Tensor], wire: Wire) -> list[Tensor]:
    """Every rank gets all shards, like :func:`~moe_lab.sim.collectives.all_gather`, in n - 1 steps."""
    check_alike(shards)
    blank = torch.zeros_like(shards[0])
    chunks = [
        [s.clone() if i == rank else blank for i, s in enumerate(shards)] for rank in range(len(shards))
    ]
    for step in range(len(shards) - 1):
        _all_gather_step(chunks, step, wire)
    return [torch.cat(own) for own in chunks]


def ring_all_reduce(tensors: Sequence[Tensor], wire: Wire) -> list[Tensor]:
    """Every rank gets the sum, like :func:`~moe_lab.sim.collectives.all_reduce`: the two halves one after the other."""
    return ring_all_gather(ring_reduce_scatter(tensors, wire), wire)
