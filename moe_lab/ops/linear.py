"""y = x W^T, with the weight's gradient added to its slot when it has one. Lesson: 04_data_parallel."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, autograd

from moe_lab.ops import reference_only
from moe_lab.ops.gradient import GradientSlot, slot_of


def reference(x: Tensor, weight: Tensor) -> Tensor:
    """``[..., in]`` and ``[out, in]`` -> ``[..., out]``; autograd's own backward."""
    return F.linear(x, weight)


class _SlotLinear(autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, slot: GradientSlot) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.slot = slot
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None]:
        x, weight = ctx.saved_tensors
        if ctx.needs_input_grad[1]:
            # Before the input gradient, whose memory may be that of x in later transports.
            ctx.slot.add_product(grad.reshape(-1, grad.shape[-1]).T, x.reshape(-1, x.shape[-1]))
            ctx.slot.mark()
        return grad @ weight if ctx.needs_input_grad[0] else None, None, None


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """``[..., in]`` and ``[out, in]`` -> ``[..., out]``."""
    slot = slot_of(weight)
    if slot is None or reference_only():
        return reference(x, weight)
    return _SlotLinear.apply(x, weight, slot)
