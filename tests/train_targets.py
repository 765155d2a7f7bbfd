"""Functions that the training tests run on ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from moe_lab.parallel import sum_gradients


def sum_gradients_with_a_gap() -> dict[str, Any]:
    """Two parameters; the second got a gradient on rank 1 only."""
    rank = dist.get_rank()
    first, second = torch.nn.Parameter(torch.zeros(())), torch.nn.Parameter(torch.zeros(()))
    first.grad = torch.tensor(float(rank + 1))
    if rank == 1:
        second.grad = torch.tensor(5.0)
    sum_gradients([first, second])
    assert first.grad is not None
    assert second.grad is not None
    return {"sums": [first.grad.item(), second.grad.item()]}
