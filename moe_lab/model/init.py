"""Initial weights as a function of (seed, parameter name, expert index) alone.

No layout enters: the experts of one process and the same experts spread over eight start bit-identical, so any layout
can be compared with one process. Matrices are normal with the configured deviation, cut off at 3 deviations; gains
start at 1. On another kind of device the same seed gives other numbers, since generators differ. Lesson: 00_start_here.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn

from moe_lab.model.experts import Experts
from moe_lab.model.layers import RMSNorm


def _generator(device: torch.device, seed: int, name: str, expert: int) -> torch.Generator:
    digest = hashlib.blake2b(f"{seed}/{name}/{expert}".encode(), digest_size=8).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest, "little") >> 1)


def _draw(weight: Tensor, std: float, seed: int, name: str, expert: int = -1) -> None:
    # Drawn in fp32 whatever the parameter's type, so that a bf16 model starts as the rounded fp32 one.
    values = torch.empty(weight.shape, dtype=torch.float32, device=weight.device)
    generator = _generator(weight.device, seed, name, expert)
    nn.init.trunc_normal_(values, std=std, a=-3 * std, b=3 * std, generator=generator)
    weight.copy_(values)


@torch.no_grad()
def initialize(model: nn.Module, std: float, seed: int) -> None:
    """Set every parameter of ``model``; buffers are set to zero."""
    for prefix, module in model.named_modules():
        for leaf, parameter in module.named_parameters(recurse=False):
            name = f"{prefix}.{leaf}" if prefix else leaf
            if isinstance(module, RMSNorm):
                parameter.fill_(1.0)
            elif isinstance(module, Experts):
                for local, weight in enumerate(parameter):
                    _draw(weight, std, seed, name, module.first + local)
            else:
                _draw(parameter, std, seed, name)
        for buffer in module.buffers(recurse=False):
            buffer.zero_()
