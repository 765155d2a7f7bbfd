"""Functions that the data-parallel tests run on ranks. Several cases a call, since starting ranks is the slow part."""

from __future__ import annotations

from typing import Any

import torch

from moe_lab.config import ParallelConfig, TrainConfig
from moe_lab.fields import from_dict, override
from moe_lab.ops.linear import linear
from moe_lab.parallel import CommLog, Mesh, ShardedDataParallel, world
from moe_lab.train import Trainer


def full(parameter: torch.Tensor) -> torch.Tensor:
    """The whole of a parameter that may be a DTensor."""
    return parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter


def train(config: dict[str, Any], variants: list[list[str]], steps: int) -> dict[str, Any]:
    """Train ``steps`` steps for each list of overrides; losses, norms, and the first step's and last parameters on rank 0."""
    results = []
    for changes in variants:
        trainer = Trainer(override(from_dict(TrainConfig, config), changes), show=False)
        with CommLog() as log:
            trainer.train_step()
        sent = {"wire": log.wire_bytes(), "kinds": log.by_kind(), "unknown": dict(log.unknown)}
        for _ in range(steps - 1):
            trainer.train_step()
        rows = trainer.metrics.fetch()
        parameters = {n: p.flatten().tolist() for n, p in trainer.whole_state().items()}
        results.append(
            {
                "losses": [r["train/CE loss"] for r in rows],
                "norms": [r["optim/total grad norm"] for r in rows],
                "parameters": parameters if world()[0] == 0 else None,
                "sent": sent,
                "memory": trainer.engine.memory() if hasattr(trainer.engine, "memory") else None,
                "buckets": [[b.size, b.group.size] for b in getattr(trainer.engine, "buckets", [])],
            }
        )
    return {"variants": results}


def gradients(config: dict[str, Any], variants: list[list[str]], seeds: list[int]) -> dict[str, Any]:
    """The reduced gradient of the first step for each list of overrides, from the initial weights of each seed; on rank 0."""
    results = []
    for changes in variants:
        by_seed = []
        for seed in seeds:
            trainer = Trainer(
                override(from_dict(TrainConfig, config), [*changes, f"init_seed={seed}"]), show=False
            )
            taken: dict[str, list[float]] = {}

            def take(
                lr: float,
                loss: torch.Tensor,
                trainer: Trainer = trainer,
                taken: dict[str, list[float]] = taken,
            ) -> Any:
                for name, parameter in trainer.model.named_parameters():
                    taken[name] = whole_gradient(trainer, name, parameter).flatten().tolist()
                return torch.zeros(()), torch.zeros(())

            trainer.engine.step = take  # type: ignore[method-assign]
            trainer.train_step()
            by_seed.append(taken if world()[0] == 0 else None)
        results.append(by_seed)
    return {"variants": results}


def whole_gradient(trainer: Trainer, name: str, parameter: torch.nn.Parameter) -> torch.Tensor:
    """The reduced gradient, put together from the shards that the ranks keep."""
    if not hasattr(trainer.engine, "buckets"):
        assert parameter.grad is not None
        return full(parameter.grad) / trainer.engine.loss_scale * trainer.mesh.dp.size
    for bucket in trainer.engine.buckets:
        for member in bucket.members:
            if member.name == name:
                flat = bucket.gradients.clone()
                if trainer.engine.reducer.sharded and bucket.group.size > 1:
                    parts = [torch.empty_like(flat[bucket.shard]) for _ in range(bucket.group.size)]
                    torch.distributed.all_gather(
                        parts, flat[bucket.shard].contiguous(), group=bucket.group.handle
                    )
                    flat = torch.cat(parts)
                gradient = bucket.view(flat, member)
                ep = trainer.mesh.ep
                if bucket.kind == "expert" and ep.size > 1:
                    experts = [torch.empty_like(gradient) for _ in range(ep.size)]
                    torch.distributed.all_gather(experts, gradient.contiguous(), group=ep.handle)
                    gradient = torch.cat(experts)
                return gradient
    raise KeyError(name)


def gap(sharded: bool) -> dict[str, Any]:
    """Two weights; the second is used on rank 1 only. One step of the optimizer; decay must reach both everywhere."""
    rank, ranks = world()
    model = torch.nn.ParameterDict(
        {"a": torch.nn.Parameter(torch.ones(3, 4)), "b": torch.nn.Parameter(torch.ones(3, 4))}
    )
    parallel = ParallelConfig(shard_optimizer=sharded).resolve(ranks)
    from moe_lab.config import OptimConfig

    optim = OptimConfig(lr=0.1, weight_decay=0.5, max_grad_norm=1e9)
    engine = ShardedDataParallel(model, Mesh(parallel), parallel, optim, {"a": True, "b": True})
    x = torch.full((2, 4), float(rank + 1))
    engine.begin()
    engine.last = True
    y = linear(x, model["a"]).sum()
    if rank == 1:
        y = y + linear(x, model["b"]).sum()
    y.backward()
    engine.finish()
    norm, applied = engine.step(0.1, torch.tensor(1.0))
    return {
        "norm": norm.item(),
        "applied": applied.item(),
        "a": model["a"].tolist(),
        "b": model["b"].tolist(),
    }


def grid(pp: int, ep: int) -> dict[str, Any]:
    """The mesh's groups as this rank sees them."""
    import torch.distributed as dist

    transport = "all_to_all" if ep > 1 else "local"
    mesh = Mesh(ParallelConfig(pp=pp, ep=ep, transport=transport))

    def members(group: Any) -> list[int]:
        return dist.get_process_group_ranks(group.handle) if group.handle is not None else [dist.get_rank()]

    return {
        "ranks": mesh.ranks.tolist(),
        **{name: members(getattr(mesh, name)) for name in ("pp", "dp", "edp", "ep")},
    }
