"""The exercises of lesson 00_start_here, checked against the package's parameter counts and schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from moe_lab import presets
from moe_lab.checks.exercise import Case, run_exercise
from moe_lab.config import ModelConfig, OptimConfig
from moe_lab.plan import count_parameters
from moe_lab.train.optim import learning_rate


def check_active_parameters(function: Callable[[ModelConfig, int], int]) -> bool:
    """``function(model, total) -> active``: parameters that one token uses, from those that the model has in all."""

    def compare(name: str) -> str | None:
        model = presets.get(name).model
        counts = count_parameters(model)
        active = function(model, counts.total)
        return (
            None
            if active == counts.active
            else f"{active!r}, but must be {counts.active:,} of {counts.total:,}"
        )

    def cases() -> Iterator[Case]:
        for name in ("laptop", "tiny-64e", "bench-8l", "ultra-256e"):
            yield name, partial(compare, name)

    return run_exercise("active_parameters", cases())


def check_learning_rate(function: Callable[[int, int, int, float, float], float]) -> bool:
    """``function(step, steps, warmup, peak, final) -> rate``: linear warm-up, then half a cosine from ``peak`` to ``final``."""

    def compare(step: int, steps: int, warmup: int, peak: float, final: float) -> str | None:
        config = OptimConfig(lr=peak, schedule="cosine", warmup_steps=warmup, final_fraction=final / peak)
        expected, rate = learning_rate(config, step, steps), function(step, steps, warmup, peak, final)
        return None if abs(rate - expected) <= 1e-9 * peak else f"{rate!r}, but must be {expected:.6g}"

    def cases() -> Iterator[Case]:
        for step, steps, warmup in (
            (0, 100, 10),
            (9, 100, 10),
            (10, 100, 10),
            (55, 100, 10),
            (99, 100, 10),
            (0, 5, 0),
        ):
            yield (
                f"step {step} of {steps}, warm-up {warmup}",
                partial(compare, step, steps, warmup, 3e-3, 3e-4),
            )

    return run_exercise("learning_rate", cases())
