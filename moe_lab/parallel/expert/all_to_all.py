"""The synchronised, dropless transport: variable all-to-alls over any backend.

Each rank sorts its rows by expert, which sorts them by owner too, exchanges how many rows go to which expert, and sends
them; the owner sorts what arrived from source-rank order into expert order, runs its experts, and everything goes back the
way it came. The split sizes are read by the host, one wait a layer: what the device-resident transports get rid of.
Technical report, section 5.3. Lesson: 05_expert_parallel.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe_lab.errors import ConfigError
from moe_lab.model.dispatch import ExpertFunction, Routing
from moe_lab.ops.permute import expert_order, permute, unpermute
from moe_lab.parallel.mesh import Group


@dataclass
class Exchange:
    """How many rows each rank sends (``sent``) and receives (``received``), by peer; host numbers."""

    sent: list[int]
    received: list[int]

    def reversed(self) -> Exchange:
        """The way back."""
        return Exchange(self.received, self.sent)


@dataclass
class Arrived:
    """Rows at their experts: ``rows [R, D]`` in local expert order, ``offsets [L]`` int32, and the way back.

    ``order`` and ``inverse``: of this rank's own slots. ``arrival`` and ``departure``: from source-rank order to expert
    order and back, over the received rows.
    """

    rows: Tensor
    offsets: Tensor
    order: Tensor
    inverse: Tensor
    arrival: Tensor
    departure: Tensor
    exchange: Exchange


class _AllToAll(torch.autograd.Function):
    """Rows to peers by an :class:`Exchange`; the gradient takes the way back."""

    @staticmethod
    def forward(ctx: Any, rows_RD: Tensor, exchange: Exchange, group: dist.ProcessGroup) -> Tensor:
        ctx.exchange, ctx.group = exchange, group
        return _swap(rows_RD, exchange, group)

    @staticmethod
    def backward(ctx: Any, grad_RD: Tensor) -> tuple[Tensor, None, None]:
        return _swap(grad_RD.contiguous(), ctx.exchange.reversed(), ctx.group), None, None


def _swap(rows_RD: Tensor, exchange: Exchange, group: dist.ProcessGroup) -> Tensor:
    out = rows_RD.new_empty(sum(exchange.received), rows_RD.shape[1])
    dist.all_to_all_single(out, rows_RD, exchange.received, exchange.sent, group=group)
    return out


class AllToAllTransport:
    """Transport over ``group``, whose ranks hold ``n_experts / group.size`` neighbouring experts each. Drops nothing."""

    def __init__(self, group: Group, n_experts: int) -> None:
        if n_experts % group.size:
            raise ConfigError(f"expert-parallel degree {group.size} does not divide {n_experts} experts")
        self.group = group
        self.local_experts = n_experts // group.size

    def dispatch(self, x_TD: Tensor, routing: Routing) -> Arrived:
        """Send each token's row once for each expert it chose, to the expert's owner: ``[T, D]`` -> rows in expert order."""
        handle = self.group.handle
        assert handle is not None
        ranks, local = self.group.size, self.local_experts
        order, inverse, counts = expert_order(routing.indices, ranks * local)
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts, group=handle)
        # The wait: the host learns the sizes of both directions at once.
        sizes = torch.stack([counts.view(ranks, local).sum(1), theirs.view(ranks, local).sum(1)]).tolist()
        exchange = Exchange(sizes[0], sizes[1])
        rows = _AllToAll.apply(permute(x_TD, order, inverse, routing.indices.shape[1]), exchange, handle)
        # Row by row, the local expert it is for: peers in turn, each in expert order.
        owner = torch.arange(local, device=x_TD.device).repeat(ranks)
        expert_of_row = owner.repeat_interleave(theirs.long(), output_size=sum(exchange.received))
        arrival, departure, _ = expert_order(expert_of_row, local)
        offsets = theirs.view(ranks, local).sum(0).cumsum(0, dtype=torch.int32)
        return Arrived(
            permute(rows, arrival, departure, 1), offsets, order, inverse, arrival, departure, exchange
        )

    def combine(self, rows_RD: Tensor, sent: Arrived, routing: Routing) -> Tensor:
        """Send expert outputs back to their tokens' rank and add them up by weight: rows -> ``[T, D]``."""
        assert self.group.handle is not None
        back = permute(rows_RD, sent.departure, sent.arrival, 1)
        rows = _AllToAll.apply(back, sent.exchange.reversed(), self.group.handle)
        return unpermute(rows, sent.order, sent.inverse, routing.weights)

    def __call__(self, x_TD: Tensor, routing: Routing, experts: ExpertFunction) -> Tensor:
        """``[T, D] -> [T, D]``."""
        sent = self.dispatch(x_TD, routing)
        return self.combine(experts(sent.rows, sent.offsets), sent, routing)
