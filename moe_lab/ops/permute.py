"""Rows into expert order and back: what happens to token rows on both sides of the experts.

Shapes: T tokens, K experts a token, R = T K rows, D width. Row r of the permuted array belongs to slot ``order[r]`` of
the flattened ``[T, K]`` choice; ``inverse`` is the permutation the other way. Nothing here reads a value on the host.

Each gradient is written as a gather: a scatter-add would sum in an order that changes from run to run on a GPU.
Lesson: 03_gpu_resident_routing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_lab.ops import reference_only


def expert_order(indices_TK: Tensor, n_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sort the T K slots by expert, earlier tokens first.

    Returns ``(order [R], inverse [R], counts [E])``, int64, int64 and int32.
    """
    flat = indices_TK.reshape(-1)
    order = torch.argsort(flat, stable=True)
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.numel(), device=order.device)
    counts = torch.zeros(n_experts, dtype=torch.int32, device=flat.device)
    # scatter_add, since bincount waits for the host to learn its output size.
    counts.scatter_add_(0, flat.long(), torch.ones_like(flat, dtype=torch.int32))
    return order, inverse, counts


def permute_reference(x_TD: Tensor, order: Tensor, top_k: int) -> Tensor:
    """Row r is the token of slot ``order[r]``; plain indexing, autograd's own backward."""
    return x_TD[order // top_k]


def unpermute_reference(rows_RD: Tensor, inverse: Tensor, weights_TK: Tensor) -> Tensor:
    """y_t = sum_k weights[t, k] * (row of slot (t, k)); plain indexing, autograd's own backward."""
    tokens, top_k = weights_TK.shape
    rows_TKD = rows_RD[inverse].view(tokens, top_k, rows_RD.shape[1])
    return (rows_TKD * weights_TK.to(rows_RD.dtype).unsqueeze(-1)).sum(1)


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, order: Tensor, inverse: Tensor, top_k: int) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.top_k = top_k
        return x_TD.index_select(0, order // top_k)

    @staticmethod
    def backward(ctx: Any, grad_RD: Tensor) -> tuple[Tensor, None, None, None]:
        (inverse,) = ctx.saved_tensors
        tokens = inverse.numel() // ctx.top_k
        grad_TKD = grad_RD.index_select(0, inverse).view(tokens, ctx.top_k, grad_RD.shape[1])
        return grad_TKD.sum(1), None, None, None


class _Unpermute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_RD: Tensor, order: Tensor, inverse: Tensor, weights_TK: Tensor) -> Tensor:
        tokens, top_k = weights_TK.shape
        rows_TKD = rows_RD.index_select(0, inverse).view(tokens, top_k, rows_RD.shape[1])
        ctx.save_for_backward(rows_TKD, order, weights_TK)
        return torch.bmm(weights_TK.to(rows_RD.dtype).unsqueeze(1), rows_TKD).squeeze(1)

    @staticmethod
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor | None, None, None, Tensor | None]:
        rows_TKD, order, weights_TK = ctx.saved_tensors
        top_k = weights_TK.shape[1]
        grad_rows = grad_weights = None
        if ctx.needs_input_grad[0]:
            slot_weights = weights_TK.reshape(-1).index_select(0, order).to(grad_TD.dtype)
            grad_rows = grad_TD.index_select(0, order // top_k).mul_(slot_weights.unsqueeze(1))
        if ctx.needs_input_grad[3]:
            grad_weights = torch.bmm(rows_TKD, grad_TD.unsqueeze(2)).squeeze(2).to(weights_TK.dtype)
        return grad_rows, None, None, grad_weights


def permute(x_TD: Tensor, order: Tensor, inverse: Tensor, top_k: int) -> Tensor:
    """Rows in expert order, ``[T, D] -> [R, D]``; each token appears ``top_k`` times."""
    if reference_only():
        return permute_reference(x_TD, order, top_k)
    return _Permute.apply(x_TD, order, inverse, top_k)


def unpermute(rows_RD: Tensor, order: Tensor, inverse: Tensor, weights_TK: Tensor) -> Tensor:
    """Weighted sum of each token's rows, ``[R, D] -> [T, D]``; gradients reach the rows and the weights."""
    if reference_only():
        return unpermute_reference(rows_RD, inverse, weights_TK)
    return _Unpermute.apply(rows_RD, order, inverse, weights_TK)
