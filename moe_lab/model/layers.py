"""The small parts: linear map, embedding, RMSNorm, SwiGLU MLP, rotary positions. Lesson: 01_moe_layer."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_lab.ops.linear import linear
from moe_lab.ops.rmsnorm import rms_norm
from moe_lab.ops.swiglu import swiglu


class Linear(nn.Module):
    """y = x W^T without bias; ``weight [out, in]``. No weight is drawn here: ``init.initialize`` does that by name."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))

    def forward(self, x: Tensor) -> Tensor:
        """``[..., in] -> [..., out]``."""
        return linear(x, self.weight)


class Embedding(nn.Module):
    """Rows of ``weight [V, D]`` by token id."""

    def __init__(self, vocab_size: int, d_model: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, d_model))

    def forward(self, tokens: Tensor) -> Tensor:
        """``[...]`` int64 -> ``[..., D]``."""
        return F.embedding(tokens, self.weight)


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * gain over the last dimension, in fp32 at least (arXiv 1910.07467)."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """``[..., width] -> [..., width]``, in the type of ``x``."""
        return rms_norm(x, self.weight, self.eps)


class MLP(nn.Module):
    """SwiGLU MLP, the dense layers' and the shared expert's: ``gate_up [2F, D]``, gate first, and ``down [D, F]``."""

    def __init__(self, d_model: int, hidden: int) -> None:
        super().__init__()
        self.gate_up = Linear(d_model, 2 * hidden)
        self.down = Linear(hidden, d_model)

    def forward(self, x: Tensor) -> Tensor:
        """``[..., D] -> [..., D]``."""
        return self.down(swiglu(self.gate_up(x)))


def rope_tables(
    length: int, head_dim: int, theta: float, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """cos and sin ``[S, C/2]`` of the angles position * theta^(-2i/C) (RoFormer, arXiv 2104.09864).

    Angles are always fp32, as in the models that are loaded from elsewhere; only the result takes ``dtype``.
    """
    frequencies = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim)
    angles = torch.outer(torch.arange(length, dtype=torch.float32, device=device), frequencies)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x_BHSC: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
    """Turn the pairs (x_i, x_{i + C/2}) by their position's angle: ``[B, H, S, C] -> [B, H, S, C]``."""
    cos, sin = tables
    first, second = x_BHSC.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
