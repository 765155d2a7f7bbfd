"""How far two results are apart, in one number or one sentence. Lesson: 01_moe_layer."""

from __future__ import annotations

import torch
from torch import Tensor


def difference(mine: Tensor, reference: Tensor) -> float:
    """Largest ``|mine - reference|`` over the largest ``|reference|`` (over 1 where that is 0), computed in fp64.

    NaN if either holds a NaN. Both have the same shape.
    """
    if reference.numel() == 0:
        return 0.0
    expected = reference.detach().double()
    gap = (mine.detach().double() - expected).abs().max()
    return float(gap / (expected.abs().max() or 1.0))


def same(name: str, mine: Tensor, reference: Tensor, tolerance: float = 1e-6) -> float:
    """Print how far ``mine`` is from ``reference`` and return it, see :func:`difference`.

    Raises ``AssertionError`` with one sentence if the shapes differ or the difference exceeds ``tolerance``.
    """
    if mine.shape != reference.shape:
        raise AssertionError(
            f"{name}: shape {tuple(mine.shape)} is not the reference's {tuple(reference.shape)}"
        )
    apart = difference(mine, reference)
    if not apart <= tolerance:  # also catches NaN
        raise AssertionError(
            f"{name}: {explain('mine', mine, reference, tolerance) or f'difference {apart:.1e}'}"
        )
    print(f"same  {name}: {apart:.1e} apart, allowed {tolerance:.0e}")
    return apart


def explain(name: str, mine: object, reference: Tensor, tolerance: float) -> str | None:
    """What is wrong with ``mine``, in one sentence, or None if it is ``reference`` within ``tolerance``."""
    if not isinstance(mine, Tensor):
        return f"{name} is {'None' if mine is None else f'a {type(mine).__name__}'}, but must be a tensor"
    if mine.shape != reference.shape:
        return f"{name} has shape {tuple(mine.shape)}, but must have {tuple(reference.shape)}"
    apart = difference(mine, reference)
    if apart <= tolerance:
        return None
    expected = reference.detach().double()
    gap = (mine.detach().double() - expected).abs().nan_to_num(nan=torch.inf)
    allowed = tolerance * float(expected.abs().max() or 1.0)
    wrong = int((gap > allowed).sum())
    place = tuple(int(i) for i in torch.unravel_index(gap.argmax(), gap.shape))
    values = f"{float(mine.detach()[place]):.6g}, but must be {float(reference.detach()[place]):.6g}"
    if not place:
        return f"{name} is {values}"
    where = f"{name}[{', '.join(map(str, place))}]"
    return f"{wrong} of {gap.numel()} values of {name} differ; the furthest, {where}, is {values}"
