"""From a routing decision to the experts and back, on one process.

``Routing`` is what the router hands on; an ``ExpertTransport`` takes it from there. ``LocalTransport`` is the one
without expert parallelism, and what every other transport is compared with. ``dispatch`` and ``combine`` are its two
halves: the same code that a lesson steps through. Lessons: 01_moe_layer, 05_expert_parallel.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from moe_lab.ops.permute import expert_order, permute, unpermute


@dataclass
class Routing:
    """The router's decision for T tokens, all on the device; the host reads none of it in a training step.

    ``indices [T, K]`` int32: chosen experts. ``weights [T, K]`` fp32: what their outputs are multiplied by, the merge
    rule included. ``logits [T, E]`` and ``scores [T, E]``: before and after gating, over all experts. ``requested [E]``
    and ``kept [E]`` int32: routed slots by expert before and after capacity.
    """

    indices: Tensor
    weights: Tensor
    logits: Tensor
    scores: Tensor
    requested: Tensor
    kept: Tensor


class ExpertFunction(Protocol):
    """The grouped MLP: rows in expert order and the experts' inclusive ends, to rows."""

    def __call__(self, rows_RD: Tensor, offsets: Tensor, out: Tensor | None = None, /) -> Tensor:
        """``[R, D]``, ``offsets [E]`` int32 -> ``[R, D]``."""
        ...


class ExpertTransport(Protocol):
    """Takes token rows to the experts they chose and brings the weighted sum back; autograd-aware."""

    def __call__(self, x_TD: Tensor, routing: Routing, experts: ExpertFunction, /) -> Tensor:
        """``x [T, D]`` -> ``y [T, D]``, y_t = sum_k weights[t, k] * expert(indices[t, k])(x_t)."""
        ...


@dataclass
class Dispatched:
    """Rows at the experts: ``rows [R, D]`` in expert order, ``offsets [E]`` int32 inclusive ends, and the way back."""

    rows: Tensor
    offsets: Tensor
    order: Tensor
    inverse: Tensor


class LocalTransport:
    """All experts on this process: permute rows into expert order, run the experts, permute back. Drops nothing."""

    def dispatch(self, x_TD: Tensor, routing: Routing) -> Dispatched:
        """Copy each token's row once for each expert it chose, sorted by expert: ``[T, D] -> [T K, D]``."""
        order, inverse, counts = expert_order(routing.indices, routing.requested.numel())
        offsets = counts.cumsum(0, dtype=torch.int32)
        return Dispatched(permute(x_TD, order, inverse, routing.indices.shape[1]), offsets, order, inverse)

    def combine(self, rows_RD: Tensor, sent: Dispatched, routing: Routing) -> Tensor:
        """Weighted sum of each token's K expert rows: ``[T K, D] -> [T, D]``."""
        return unpermute(rows_RD, sent.order, sent.inverse, routing.weights)

    def __call__(self, x_TD: Tensor, routing: Routing, experts: ExpertFunction) -> Tensor:
        sent = self.dispatch(x_TD, routing)
        return self.combine(experts(sent.rows, sent.offsets), sent, routing)
