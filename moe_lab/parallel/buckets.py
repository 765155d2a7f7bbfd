"""Flat memory for parameters and gradients, cut into buckets that are communicated whole.

A bucket holds parameters of one process group, one kind of weight decay and one type, in reverse order of the model, since
backward reaches the last layers first. Its weights and its gradients are two flat arrays; parameters and gradient slots are
views of them. Padded to a multiple of the group, so that each rank of the group owns an equal, contiguous shard: balanced
whatever the tensors' shapes, one collective a bucket, and no packing. Lesson: 04_data_parallel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from moe_lab.parallel.mesh import Group

ALIGNMENT = 64  # elements: every parameter starts at a multiple, for aligned and vectorised access


@dataclass
class Member:
    """A parameter's place in its bucket: elements ``start .. start + parameter.numel()``."""

    name: str
    parameter: nn.Parameter
    start: int


@dataclass(frozen=True)
class Piece:
    """What this rank holds of one global, flattened array: ``data [n]`` is elements ``offset .. offset + n`` of ``size``.

    ``key`` names the array whatever the layout is; pieces of all ranks with one key cover it, equal where they overlap.
    """

    key: str
    size: int
    offset: int
    data: Tensor


@dataclass
class Bucket:
    """``weights`` and ``gradients``: flat arrays of ``size`` elements; ``shard``: the slice this rank owns."""

    group: Group
    kind: str
    decay: bool
    members: list[Member] = field(default_factory=list)
    size: int = 0
    weights: Tensor = field(init=False)
    gradients: Tensor = field(init=False)
    shard: slice = field(init=False)
    master: Tensor = field(init=False)

    def allocate(self, shards: int, weights: torch.dtype | None) -> None:
        """Make the flat arrays, move the parameters into ``weights``, cut ``shards`` equal shards.

        ``weights``: the type to keep the parameters in (None: their own). ``master`` is this rank's shard of them in fp32 at
        least, as they were before they were rounded; the shard of ``weights`` itself where that is as precise.
        """
        unit = ALIGNMENT * shards
        self.size = -(-self.size // unit) * unit
        first = self.members[0].parameter
        narrow = weights or first.dtype
        flat = torch.zeros(
            self.size, dtype=torch.promote_types(first.dtype, torch.float32), device=first.device
        )
        for member in self.members:
            self.view(flat, member).copy_(member.parameter.detach())
        length = self.size // shards
        index = self.group.rank if shards > 1 else 0
        self.shard = slice(index * length, (index + 1) * length)
        if narrow == flat.dtype:
            self.weights, self.gradients = flat, torch.zeros_like(flat)
            self.master = flat[self.shard]
        else:
            self.weights, self.master = flat.to(narrow), flat[self.shard].clone()
            self.gradients = flat.zero_()
        for member in self.members:
            member.parameter.data = self.view(self.weights, member)

    @staticmethod
    def view(flat: Tensor, member: Member) -> Tensor:
        """The part of a flat array that belongs to ``member``, in its shape."""
        return flat[member.start : member.start + member.parameter.numel()].view(member.parameter.shape)


def build_buckets(
    named: Sequence[tuple[str, nn.Parameter]],
    group_of: Callable[[str], tuple[str, Group]],
    decays: Callable[[str], bool],
    bucket_elements: int,
    sharded: bool,
    weights: torch.dtype | None = None,
) -> list[Bucket]:
    """Buckets of at most about ``bucket_elements`` (a larger parameter has one alone), in the order they fill in backward.

    ``group_of(name)``: (kind, group) that the parameter's gradient is reduced over; ``decays(name)``: weight decay or not.
    ``weights``: the type that the parameters are kept in from now on (None: their own).
    """
    filling: dict[tuple[str, bool, torch.dtype], Bucket] = {}
    closed: list[Bucket] = []
    for name, parameter in reversed(named):
        kind, group = group_of(name)
        key = (kind, decays(name), parameter.dtype)
        bucket = filling.get(key)
        if bucket is None or bucket.size + parameter.numel() > bucket_elements:
            if bucket is not None:
                closed.append(bucket)
            bucket = filling[key] = Bucket(group, kind, key[1])
        bucket.members.append(Member(name, parameter, bucket.size))
        bucket.size += -(-parameter.numel() // ALIGNMENT) * ALIGNMENT
    position = {name: index for index, (name, _) in enumerate(named)}
    # A bucket is complete when its earliest parameter is: the later that is, the later the bucket is reduced.
    buckets = sorted([*closed, *filling.values()], key=lambda b: -min(position[m.name] for m in b.members))
    for bucket in buckets:
        bucket.allocate(bucket.group.size if sharded else 1, weights)
    return buckets
