"""Where a weight's gradient goes: straight into a flat fp32 buffer, rather than through ``.grad``.

A :class:`GradientSlot` is a parameter's view of such a buffer. The matrix products of this package add their weight
gradient to it in backward, in the product itself where that can accumulate in the buffer's precision, and mark it; so
one mechanism serves plain backward, schedules that compute weight gradients apart, and weights that have no ``.grad``.
A parameter without a slot gets its gradient from autograd as usual. Lesson: 04_data_parallel.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


class GradientSlot:
    """``total``: the buffer's view in the parameter's shape, fp32 at least. ``mark()``: one use's gradient has been added."""

    def __init__(self, total: Tensor, mark: Callable[[], None]) -> None:
        self.total = total
        self.mark = mark

    def add(self, gradient: Tensor) -> None:
        """total += gradient, in one pass that also widens bf16."""
        self.total.add_(gradient)

    def add_product(self, left: Tensor, right: Tensor, part: int | None = None) -> None:
        """total += left @ right; ``part`` adds to ``total[part]`` (one expert of a stack).

        ``left [out, R]``, ``right [R, in]``. The product accumulates in the buffer where types allow it: equal types
        anywhere, and bf16 into fp32 on a CUDA device.
        """
        total = self.total if part is None else self.total[part]
        if left.dtype == total.dtype:
            torch.addmm(total, left, right, out=total)
        elif left.is_cuda and total.dtype == torch.float32:
            torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
        else:
            total.add_(left @ right)


def slot_of(weight: Tensor) -> GradientSlot | None:
    """The slot that a reducer gave to ``weight``, if any."""
    return getattr(weight, "gradient_slot", None)


def set_slot(weight: nn.Parameter, slot: GradientSlot | None) -> None:
    """Give ``weight`` a slot, or take it away."""
    weight.gradient_slot = slot  # type: ignore[attr-defined]
