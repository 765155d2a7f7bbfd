"""Learning-rate schedules, and which parameters decay. Lesson: 00_start_here."""

from __future__ import annotations

import math

from torch import nn

from moe_lab.config import OptimConfig
from moe_lab.model.layers import Embedding, RMSNorm


def learning_rate(config: OptimConfig, step: int, steps: int) -> float:
    """The rate of optimizer step ``step``, counted from 0, of ``steps``.

    Linear warm-up reaches ``lr`` after ``warmup_steps``; "cosine" and "wsd" come down to
    ``final_fraction * lr`` at step ``steps``, the one after the last, so the last step's rate is a little above it.
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


def exempt_modules(config: OptimConfig) -> tuple[type[nn.Module], ...]:
    """The classes of modules whose parameters have no weight decay."""
    kinds = {"norm": RMSNorm, "embedding": Embedding}
    return tuple(kinds[kind] for kind in config.no_decay)
