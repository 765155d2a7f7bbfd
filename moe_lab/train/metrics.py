"""Numbers of a training run, gathered on the device and fetched at intervals. Lesson: 00_start_here.

Names follow Olmo-core: ``train/CE loss`` is the cross-entropy alone in nats a label, ``train/Z loss`` and the balance
losses are what is added to it. A step appends a few device tensors; the host waits for them only when a line is due.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from moe_lab.config import TrainConfig
from moe_lab.model import LossSums, Transformer
from moe_lab.parallel import sum_over_ranks


class StepMetrics:
    """Collects the sums of each step and turns them into named values at :meth:`fetch`."""

    def __init__(self, config: TrainConfig, model: Transformer) -> None:
        self.config = config
        self.layers = list(model.moe_layers())
        self.pending: list[tuple[int, float, Tensor]] = []

    def reduce(self, sums: list[LossSums]) -> Tensor:
        """Sums of a step's microbatches over all ranks, fp64 on the device: cross-entropy, z, labels, then by layer.

        By MoE layer: balance loss, router z-loss, microbatches, and the counts of its experts. One small all-reduce.
        """
        losses = [torch.stack([s.cross_entropy, s.z, s.labels.to(s.z.dtype)]).double() for s in sums]
        parts = [torch.stack(losses).sum(0)]
        for _, layer in self.layers:
            stats = layer.stats
            assert stats.counts is not None
            assert stats.balance is not None
            assert stats.z is not None
            microbatches = torch.full_like(stats.balance, stats.microbatches)
            parts += [torch.stack([stats.balance, stats.z, microbatches]).double(), stats.counts.double()]
            stats.clear()
        return sum_over_ranks(torch.cat(parts))

    def add(self, step: int, lr: float, row: Tensor, norm: Tensor, applied: Tensor) -> None:
        """Keep a finished step: what :meth:`reduce` returned, the gradient norm, and whether the step was applied."""
        self.pending.append((step, lr, torch.cat([row, torch.stack([norm.double(), applied.double()])])))

    def fetch(self) -> list[dict[str, Any]]:
        """The collected steps as dicts, oldest first; waits for the device once."""
        if not self.pending:
            return []
        rows = torch.stack([row for _, _, row in self.pending]).tolist()
        named = [self._named(step, lr, row) for (step, lr, _), row in zip(self.pending, rows)]
        self.pending.clear()
        return named

    def _named(self, step: int, lr: float, row: list[float]) -> dict[str, Any]:
        cross_entropy, z, labels = row[:3]
        loss = cross_entropy / labels
        values: dict[str, Any] = {
            "step": step,
            "train/CE loss": loss,
            "train/PPL": math.exp(min(loss, 80.0)),
            "train/Z loss": self.config.z_loss * z / labels,
            "optim/LR": lr,
            "optim/total grad norm": row[-2],
            "optim/step skipped": 1 - row[-1],
            "throughput/total tokens": step * self.config.tokens_per_step,
        }
        moe = self.config.model.moe
        if moe is None or not self.layers:
            return values
        at, balance_sum, z_sum, counts = 3, 0.0, 0.0, []
        for index, _ in self.layers:
            balance, router_z, microbatches = row[at : at + 3]
            load = row[at + 3 : at + 3 + moe.n_experts]
            at += 3 + moe.n_experts
            values[f"block {index:02d}/load imbalance"] = max(load) * len(load) / sum(load)
            values[f"block {index:02d}/load balancing loss unscaled"] = balance / microbatches
            balance_sum += balance / microbatches
            z_sum += router_z / microbatches
            counts.append([int(c) for c in load])
        values["train/load imbalance"] = max(values[f"block {i:02d}/load imbalance"] for i, _ in self.layers)
        values["train/load balancing loss unscaled"] = balance_sum
        values["train/load balancing loss"] = moe.balance_loss * balance_sum
        values["train/router Z loss"] = moe.router_z_loss * z_sum
        values["expert counts"] = counts
        return values


def summary_line(values: dict[str, Any], steps: int) -> str:
    """One line of progress for a person."""
    text = f"step {values['step']:>5}/{steps}  CE {values['train/CE loss']:.3f}"
    if "train/load imbalance" in values:
        text += f"  load max/mean {values['train/load imbalance']:.2f}"
    text += f"  |g| {values['optim/total grad norm']:.2f}  lr {values['optim/LR']:.1e}"
    if "throughput/TPS" in values:
        text += f"  {values['throughput/TPS']:,.0f} tokens/s"
    if "eval/CE loss" in values:
        text += f"  validation {values['eval/CE loss']:.3f}"
    return text
