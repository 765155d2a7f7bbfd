"""SwiGLU: silu(gate) * up, the activation of every expert and MLP here (Shazeer 2020, arXiv 2002.05202).

``gate_up`` holds the gate in the first half of the last dimension and up in the second. The fast version keeps only
its input for backward: silu is recomputed there, which costs less than writing and reading it.
Lesson: 01_moe_layer.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_lab.ops import reference_only


def reference(gate_up: Tensor) -> Tensor:
    """``[..., 2F] -> [..., F]`` in plain PyTorch."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        gate, up = gate_up.chunk(2, dim=-1)
        out = torch.empty_like(gate_up)
        grad_gate, grad_up = out.chunk(2, dim=-1)
        torch.mul(grad, F.silu(gate), out=grad_up)
        grad_gate.copy_(torch.ops.aten.silu_backward(grad * up, gate))
        return out


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up: ``[..., 2F] -> [..., F]``."""
    if reference_only():
        return reference(gate_up)
    return _SwiGLU.apply(gate_up)
