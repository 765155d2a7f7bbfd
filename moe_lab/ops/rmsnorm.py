"""RMSNorm: x / sqrt(mean(x^2) + eps) * gain over the last dimension (arXiv 1910.07467).

On a CUDA device torch's fused kernel is used; on a CPU, where torch composes it and its backward from some twenty passes
over memory, a forward and a backward of our own that keep only x and one factor a row. bfloat16 is computed in fp32.
Lesson: 01_moe_layer.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_lab.ops import reference_only


def reference(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    """``[..., D]``, gain ``[D]`` -> ``[..., D]`` in the type of ``x``, computed in fp32 at least."""
    precise = x.to(torch.promote_types(x.dtype, torch.float32))
    return (precise * torch.rsqrt(precise.square().mean(-1, keepdim=True) + eps) * gain).to(x.dtype)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: Tensor, eps: float) -> Tensor:
        # The norm of a row is one pass that writes one number; x * x would write the whole array once more.
        factor = (
            torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        )
        ctx.save_for_backward(x, gain, factor)
        return (x * factor).mul_(gain)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, gain, factor = ctx.saved_tensors
        unit = x * factor
        grad_gain = (grad * unit).sum(tuple(range(x.dim() - 1)))
        scaled = grad * gain
        along = torch.linalg.vecdot(scaled, unit).div_(x.shape[-1]).unsqueeze(-1)
        return scaled.sub_(unit.mul_(along)).mul_(factor), grad_gain, None


def rms_norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    """RMSNorm of ``x [..., D]`` with ``gain [D]``, in the type of ``x``."""
    if reference_only():
        return reference(x, gain, eps)
    if x.is_cuda or x.dtype not in (torch.float32, torch.float64):
        precise = x.to(torch.promote_types(x.dtype, torch.float32))
        return F.rms_norm(precise, x.shape[-1:], gain.to(precise.dtype), eps).to(x.dtype)
    return _RMSNorm.apply(x, gain, eps)
