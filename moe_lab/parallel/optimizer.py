"""AdamW with its fp32 state shared out over each parameter's own replicas, and the switch that skips bad steps.

Each rank keeps the fp32 master and both moments of its shard of every bucket, updates it with one kernel, and one gather a
bucket gives everyone the new weights. With weights in fp32 the master is the shard of the weights itself. Bytes a local
parameter: 2 + 4 + 12 / (size of its group) with bf16 weights. Report, section 4.3. Lesson: 04_data_parallel.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from moe_lab.config import OptimConfig
from moe_lab.ops.adamw import Hyper, adamw
from moe_lab.parallel.buckets import Bucket
from moe_lab.parallel.mesh import Group
from moe_lab.parallel.ranks import start_all_gather
from moe_lab.parallel.reducer import Reducer

WINDOW, EARLIEST = 128, 64  # steps that a spike is judged by, and how many must have passed first


@dataclass
class ShardState:
    """Master and moments of one bucket's shard, flat."""

    master: Tensor
    m: Tensor
    v: Tensor


class SpikeGuard:
    """Whether to apply a step, decided on the device from the last :data:`WINDOW` losses and gradient norms.

    A step is applied when loss and norm are both at most mean + ``sigma`` standard deviations of the window before it, or
    while fewer than :data:`EARLIEST` steps have passed. Skipped values enter the window too. ``sigma`` 0 judges by that
    alone: a step whose loss or norm is not finite is never applied, and does not enter the window. Otherwise as Olmo-core
    3.0.0's skip-step optimizer.
    """

    def __init__(self, sigma: float, device: torch.device) -> None:
        self.sigma = sigma
        self.values = torch.zeros(2, WINDOW, dtype=torch.float64, device=device)
        self.seen = torch.zeros((), dtype=torch.int64, device=device)
        self._slots = torch.arange(WINDOW, device=device)

    def judge(self, loss: Tensor, norm: Tensor) -> Tensor:
        """1.0 to apply this step, 0.0 to skip it, as a scalar on the device; adds the values to the window."""
        new = torch.stack([loss, norm]).double()
        finite = new.isfinite().all()
        apply = finite
        if self.sigma != 0:
            valid = (self._slots < self.seen).double()
            count = valid.sum().clamp(min=2)
            mean = (self.values * valid).sum(1) / count
            deviation = (((self.values - mean[:, None]).square() * valid).sum(1) / (count - 1)).sqrt()
            usual = (new <= mean + self.sigma * deviation).all()
            apply = finite & (usual | (self.seen < EARLIEST))
        here = finite & (self._slots == self.seen % WINDOW)
        self.values = torch.where(here, new[:, None], self.values)
        self.seen = self.seen + finite
        return apply.float()


class ShardedAdamW:
    """AdamW over the shards of ``reducer``'s buckets."""

    def __init__(self, reducer: Reducer, config: OptimConfig, everyone: Group) -> None:
        self.reducer, self.config, self.everyone = reducer, config, everyone
        self.state = [self._state(bucket) for bucket in reducer.buckets]
        device = reducer.buckets[0].weights.device
        self.steps = torch.zeros(
            (), dtype=torch.float32, device=device
        )  # applied steps; skipped ones do not count
        self.guard = SpikeGuard(config.skip_sigma, device)

    @staticmethod
    def _state(bucket: Bucket) -> ShardState:
        return ShardState(bucket.master, torch.zeros_like(bucket.master), torch.zeros_like(bucket.master))

    def gradient_norm(self) -> Tensor:
        """The global L2 norm over all parameters of all ranks, on the device; one scalar all-reduce."""
        squared = self.reducer.squared_norm()
        if self.everyone.size > 1:
            dist.all_reduce(squared, group=self.everyone.handle)
        return squared.sqrt()

    @torch.no_grad()
    def step(self, lr: float, loss: Tensor) -> tuple[Tensor, Tensor]:
        """Clip, update the shards, gather the weights. Returns (gradient norm before clipping, 1 if applied), on the device."""
        config = self.config
        norm = self.gradient_norm()
        scale = (config.max_grad_norm / (norm + 1e-6)).clamp(max=1.0)
        apply = self.guard.judge(loss, norm)
        self.steps += apply
        works = []
        for bucket, state in zip(self.reducer.buckets, self.state):
            hyper = Hyper(
                config.betas[0], config.betas[1], config.eps, config.weight_decay if bucket.decay else 0.0
            )
            own = bucket.weights[bucket.shard]
            grad = bucket.gradients[bucket.shard]
            dtype = state.master.dtype
            adamw(state.master, state.m, state.v, grad, own, self.steps, lr, hyper, scale.to(dtype), apply)
            if self.reducer.sharded and bucket.group.size > 1:
                works.append(start_all_gather(bucket.weights, own, bucket.group.handle))
        for work in works:
            work.wait()
        return norm, apply

    @torch.no_grad()
    def publish(self) -> None:
        """Make the weights from the masters on every rank, as a step's end does: after the masters were set."""
        for bucket, state in zip(self.reducer.buckets, self.state):
            own = bucket.weights[bucket.shard]
            if own.data_ptr() != state.master.data_ptr():
                own.copy_(state.master)
            if self.reducer.sharded and bucket.group.size > 1:
                start_all_gather(bucket.weights, own, bucket.group.handle).wait()
