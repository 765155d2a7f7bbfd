"""The old way, as a baseline: weights sharded over the ranks and gathered for every microbatch (torch's FSDP2).

Each block's weights are gathered for its forward, freed, gathered again for its backward, and its gradients
reduce-scattered, every microbatch: 2 + 2 + 4 bytes a parameter in bf16 against once a step for DDP (report, section 4.2).
With fewer shards than ranks this is HSDP: shards within a group, all-reduce across groups. Lesson: 04_data_parallel.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from moe_lab.config import OptimConfig, ParallelConfig
from moe_lab.parallel.mesh import Mesh
from moe_lab.parallel.optimizer import SpikeGuard


class FullyShardedBaseline:
    """``model`` (with a ``blocks`` list) wrapped block by block, and torch's AdamW over the shards.

    The same interface as :class:`~moe_lab.parallel.ddp.ShardedDataParallel`. ``loss_scale``: FSDP2 averages gradients over the
    ranks while ours are sums, so the loss is multiplied by their number.
    """

    def __init__(
        self,
        model: nn.Module,
        mesh: Mesh,
        parallel: ParallelConfig,
        optim: OptimConfig,
        decays: dict[str, bool],
        compute: torch.dtype,
    ) -> None:
        assert mesh.device_mesh is not None
        self.mesh, self.config = mesh, optim
        self.loss_scale = float(mesh.dp.size)
        self.last = False
        device = next(model.parameters()).device
        layout = shard_mesh(mesh, parallel.fsdp_shard)
        stored = next(model.parameters()).dtype
        policy = (
            MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=stored)
            if compute != stored
            else MixedPrecisionPolicy()
        )
        for block in model.blocks:  # type: ignore[union-attr]
            fully_shard(block, mesh=layout, mp_policy=policy, reshard_after_forward=True)
        fully_shard(model, mesh=layout, mp_policy=policy, reshard_after_forward=True)
        self.parameters = dict(model.named_parameters())
        groups = [
            {
                "params": [p for n, p in self.parameters.items() if decays[n]],
                "weight_decay": optim.weight_decay,
            },
            {"params": [p for n, p in self.parameters.items() if not decays[n]], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(
            groups, lr=optim.lr, betas=(optim.betas[0], optim.betas[1]), eps=optim.eps, foreach=True
        )
        self.guard = SpikeGuard(optim.skip_sigma, device)

    def begin(self) -> None:
        """Start a step."""
        self.optimizer.zero_grad(set_to_none=True)

    def finish(self) -> None:
        """Nothing: every microbatch has reduced its gradients already."""

    @torch.no_grad()
    def step(self, lr: float, loss: Tensor) -> tuple[Tensor, Tensor]:
        """Clip and update; returns (gradient norm before clipping, 1 if applied). The baseline may wait for the host."""
        gradients = [p.grad for p in self.parameters.values() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients, foreach=True)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        apply = self.guard.judge(loss, norm)
        if bool(apply):
            torch.nn.utils.clip_grads_with_norm_(
                self.parameters.values(), self.config.max_grad_norm, norm, foreach=True
            )
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            self.optimizer.step()
        return norm, apply


def shard_mesh(mesh: Mesh, shards: int) -> DeviceMesh:
    """The mesh that FSDP2 takes: all data-parallel ranks, or replicas x ``shards`` for HSDP."""
    size = mesh.dp.size
    if shards in (0, size):
        return mesh.dp_mesh
    device = mesh.dp_mesh.device_type
    return init_device_mesh(device, (size // shards, shards), mesh_dim_names=("replicate", "shard"))
