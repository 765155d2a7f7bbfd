"""AdamW groups and learning-rate schedules. Lesson: 00_start_here."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from moe_lab.config import OptimConfig
from moe_lab.model.layers import Embedding, RMSNorm


def learning_rate(config: OptimConfig, step: int, steps: int) -> float:
    """The rate of optimizer step ``step``, counted from 0, of ``steps``.

    Linear warm-up reaches ``lr`` after ``warmup_steps``; "cosine" and "wsd" end at ``final_fraction * lr``.
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    if config.schedule == "cosine":
        progress = (step - config.warmup_steps) / max(1, steps - config.warmup_steps)
        shape = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    else:
        shape = min(1.0, (steps - step) / config.decay_steps)
    return config.lr * (config.final_fraction + (1 - config.final_fraction) * shape)


def parameter_groups(model: nn.Module, config: OptimConfig) -> list[dict[str, Any]]:
    """Two groups, with and without weight decay; ``config.no_decay`` names the kinds that have none."""
    kinds = {"norm": RMSNorm, "embedding": Embedding}
    exempt = tuple(kinds[kind] for kind in config.no_decay)
    groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for module in model.modules():
        groups[not isinstance(module, exempt)] += list(module.parameters(recurse=False))
    return [
        {"params": groups[True], "weight_decay": config.weight_decay},
        {"params": groups[False], "weight_decay": 0.0},
    ]


def build_optimizer(model: nn.Module, config: OptimConfig) -> torch.optim.AdamW:
    """torch's fused AdamW over :func:`parameter_groups`."""
    return torch.optim.AdamW(
        parameter_groups(model, config),
        lr=config.lr,
        betas=(config.betas[0], config.betas[1]),
        eps=config.eps,
        fused=True,
    )


@torch.no_grad()
def clip_gradients(parameters: list[nn.Parameter], max_norm: float) -> torch.Tensor:
    """Scale gradients so that their global L2 norm is at most ``max_norm``; returns the norm before that, on the device.

    The factor min(1, max_norm / (norm + 1e-6)) is always applied: no branch, no wait for the host.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in gradients]))
    torch._foreach_mul_(gradients, (max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm
