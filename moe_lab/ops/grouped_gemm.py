"""Grouped matrix product: each expert multiplies its own run of rows.

Shapes: rows ``x [R, A]`` in expert order, weights ``w [E, B, A]`` (as ``F.linear`` stores them), ``offsets [E]`` int32,
the inclusive ends of the experts' runs; the product is ``[R, B]``. Experts may have no rows.

On a CPU the runs are multiplied one after the other, straight into the output. On a CUDA device of capability 9 or
10 bfloat16 goes to ``torch.nn.functional.grouped_mm``, which takes the offsets on the device: the host reads nothing.
Source: technical report, section 9. Lesson: 03_gpu_resident_routing.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_lab.errors import RoutingError
from moe_lab.ops import reference_only
from moe_lab.ops.gradient import GradientSlot, slot_of


def reference(x_RA: Tensor, w_EBA: Tensor, offsets: Tensor) -> Tensor:
    """A loop of plain products, joined; autograd's own backward. Rows past the last offset come out zero."""
    runs, start = [], 0
    for expert, end in enumerate(offsets.tolist()):
        runs.append(x_RA[start:end] @ w_EBA[expert].T)
        start = end
    rest = x_RA[start:] @ torch.zeros_like(w_EBA[0]).T
    return torch.cat([*runs, rest])


def _device_offsets(x: Tensor) -> bool:
    """Whether ``F.grouped_mm`` runs its real kernel here, rather than a loop that copies the offsets to the host."""
    return (
        x.is_cuda and x.dtype == torch.bfloat16 and torch.cuda.get_device_capability(x.device)[0] in (9, 10)
    )


class _GroupedLinear(torch.autograd.Function):
    """y = x w_e^T by runs, with both gradients by runs: no graph of one node an expert."""

    @staticmethod
    def forward(ctx: Any, x_RA: Tensor, w_EBA: Tensor, offsets: Tensor, slot: GradientSlot | None) -> Tensor:
        ctx.save_for_backward(x_RA, w_EBA, offsets)
        ctx.slot = slot
        if _device_offsets(x_RA):
            return F.grouped_mm(x_RA, w_EBA.transpose(1, 2), offs=offsets)
        ctx.ends = offsets.tolist()
        out = x_RA.new_zeros(x_RA.shape[0], w_EBA.shape[1])
        for weight, (start, end) in zip(w_EBA, _runs(ctx.ends)):
            if end > start:
                torch.mm(x_RA[start:end], weight.T, out=out[start:end])
        return out

    @staticmethod
    def backward(ctx: Any, grad_RB: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x_RA, w_EBA, offsets = ctx.saved_tensors
        slot: GradientSlot | None = ctx.slot
        grad_RB = grad_RB.contiguous()
        grad_w = _weight_gradient(ctx, x_RA, w_EBA, grad_RB, offsets) if ctx.needs_input_grad[1] else None
        grad_x = _input_gradient(ctx, x_RA, w_EBA, grad_RB, offsets) if ctx.needs_input_grad[0] else None
        if slot is not None and ctx.needs_input_grad[1]:
            slot.mark()
        return grad_x, grad_w, None, None


def _weight_gradient(
    ctx: Any, x_RA: Tensor, w_EBA: Tensor, grad_RB: Tensor, offsets: Tensor
) -> Tensor | None:
    """By runs, ``[E, B, A]``; into the slot, if there is one, and then None."""
    slot: GradientSlot | None = ctx.slot
    if _device_offsets(x_RA):
        whole = F.grouped_mm(grad_RB.T, x_RA, offs=offsets)
        if slot is None:
            return whole
        slot.add(whole)
        return None
    grad_w = torch.zeros_like(w_EBA) if slot is None else None
    for expert, (start, end) in enumerate(_runs(ctx.ends)):
        if end == start:
            continue
        if slot is not None:
            slot.add_product(grad_RB[start:end].T, x_RA[start:end], part=expert)
        elif grad_w is not None:
            torch.mm(grad_RB[start:end].T, x_RA[start:end], out=grad_w[expert])
    return grad_w


def _input_gradient(ctx: Any, x_RA: Tensor, w_EBA: Tensor, grad_RB: Tensor, offsets: Tensor) -> Tensor:
    if _device_offsets(x_RA):
        return F.grouped_mm(grad_RB, w_EBA, offs=offsets)
    grad_x = torch.zeros_like(x_RA)
    for expert, (start, end) in enumerate(_runs(ctx.ends)):
        if end > start:
            torch.mm(grad_RB[start:end], w_EBA[expert], out=grad_x[start:end])
    return grad_x


def _runs(ends: list[int]) -> list[tuple[int, int]]:
    return list(zip([0, *ends[:-1]], ends))


def grouped_linear(x_RA: Tensor, w_EBA: Tensor, offsets: Tensor) -> Tensor:
    """``[R, A] x [E, B, A] -> [R, B]``: rows ``offsets[e-1] .. offsets[e]`` times ``w[e]`` transposed.

    Raises :class:`~moe_lab.errors.RoutingError` when shapes or the offsets' type do not fit.
    """
    if x_RA.shape[1] != w_EBA.shape[2] or offsets.shape != (w_EBA.shape[0],) or offsets.dtype != torch.int32:
        raise RoutingError(
            f"grouped product of rows {tuple(x_RA.shape)} with weights {tuple(w_EBA.shape)} needs int32 offsets of shape "
            f"({w_EBA.shape[0]},) and equal last dimensions, but got {offsets.dtype} offsets of shape {tuple(offsets.shape)}"
        )
    if reference_only():
        return reference(x_RA, w_EBA, offsets)
    return _GroupedLinear.apply(x_RA, w_EBA, offsets, slot_of(w_EBA))
