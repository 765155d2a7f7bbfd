"""The routed experts of one layer: E SwiGLU MLPs as two grouped matrix products. Lessons: 01_moe_layer, 03_gpu_resident_routing."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from moe_lab.ops.grouped_gemm import grouped_linear
from moe_lab.ops.swiglu import swiglu


class Experts(nn.Module):
    """``n_experts`` SwiGLU MLPs of width F, stacked: ``gate_up [L, 2F, D]`` (gate first) and ``down [L, D, F]``.

    ``first``: global index of the first expert held here, so that a rank's experts draw the initial weights that they
    have on one process.
    """

    def __init__(self, n_experts: int, d_model: int, hidden: int, first: int = 0) -> None:
        super().__init__()
        self.first = first
        self.gate_up = nn.Parameter(torch.empty(n_experts, 2 * hidden, d_model))
        self.down = nn.Parameter(torch.empty(n_experts, d_model, hidden))

    def forward(self, rows_RD: Tensor, offsets: Tensor, out: Tensor | None = None) -> Tensor:
        """Rows in expert order, ``offsets [L]`` the experts' inclusive ends: ``[R, D] -> [R, D]``, into ``out`` if given."""
        y = grouped_linear(swiglu(grouped_linear(rows_RD, self.gate_up, offsets)), self.down, offsets)
        return y if out is None else out.copy_(y)
