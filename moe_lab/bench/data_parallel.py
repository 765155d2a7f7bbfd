"""What one step costs under each way of data parallelism: time, bytes sent, bytes held. Lesson: 04_data_parallel.

    launch.run(data_parallel.steps, ranks=4, config=to_dict(config), variants=[[], ["data_parallel=fsdp"]], steps=5)

Every variant trains the same model on the same data through the trainer itself. The variants take turns, one step each,
so that a machine that slows down for a while slows all of them; the median of each variant's steps is what to compare.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe_lab.config import TrainConfig
from moe_lab.errors import ConfigError
from moe_lab.fields import from_dict, override
from moe_lab.launch import heartbeat
from moe_lab.parallel import CommLog, ShardedDataParallel, world
from moe_lab.train import Trainer
from moe_lab.train.describe import check_supported

KINDS = ("weights", "gradients", "masters", "moments")


def steps(
    config: dict[str, Any],
    variants: list[list[str]],
    steps: int,
    warmup: int = 1,
    alternate: bool = True,
) -> dict[str, Any]:
    """Train a few steps of ``config`` (from ``fields.to_dict``) for each variant, on every rank of the process group.

    ``variants``: ``name=value`` overrides, one list a variant. ``warmup`` steps of each come first and are not timed;
    during the first of them a :class:`~moe_lab.parallel.CommLog` counts. ``alternate``: the variants take turns, which
    needs the memory of all of them at once; otherwise one follows the other.

    Returns ``{"variants": [...]}``, an entry a variant: ``seconds`` of each timed step and their ``median``,
    ``tokens_per_second`` at the median, ``microbatches`` a rank, ``sent`` (see :func:`traffic`), ``memory`` in bytes by kind
    (see :func:`memory`), ``parameters`` of the model, ``losses`` and ``norms`` of all steps. Raises
    :class:`~moe_lab.errors.ConfigError` before the first step if a variant cannot run.
    """
    if steps < 1 or warmup < 1:
        raise ConfigError(f"steps is {steps} and warmup {warmup}, but both must be at least 1")
    settings = [override(from_dict(TrainConfig, config), changes) for changes in variants]
    for each in settings:
        check_supported(each)
        each.microbatches_per_rank(each.parallel.resolve(world()[1]).dp)
    batches = [settings] if alternate else [[each] for each in settings]
    return {"variants": [entry for batch in batches for entry in _measure(batch, steps, warmup)]}


def _measure(settings: list[TrainConfig], steps: int, warmup: int) -> list[dict[str, Any]]:
    trainers = [Trainer(each, show=False) for each in settings]
    sent = []
    for trainer in trainers:
        with CommLog() as log:
            trainer.train_step()
        sent.append(traffic(log, trainer.config))
        for _ in range(warmup - 1):
            trainer.train_step()
    seconds: list[list[float]] = [[] for _ in trainers]
    for number in range(steps):
        for index, trainer in enumerate(trainers):
            seconds[index].append(_timed(trainer))
        heartbeat(f"measured step {number + 1} of {steps}")
    return [_entry(t, sent[i], seconds[i]) for i, t in enumerate(trainers)]


def _timed(trainer: Trainer) -> float:
    """Seconds of one step, from a moment at which all ranks are ready to the end of this rank's work."""
    if world()[1] > 1:
        dist.barrier()
    if trainer.device.type == "cuda":
        torch.cuda.synchronize(trainer.device)
    start = time.perf_counter()
    trainer.train_step()
    if trainer.device.type == "cuda":
        torch.cuda.synchronize(trainer.device)
    return time.perf_counter() - start


def _entry(trainer: Trainer, sent: dict[str, Any], seconds: list[float]) -> dict[str, Any]:
    rows = trainer.metrics.fetch()
    median = statistics.median(seconds)
    return {
        "seconds": seconds,
        "median": median,
        "tokens_per_second": trainer.config.tokens_per_step / median,
        "microbatches": trainer.microbatches,
        "sent": sent,
        "memory": memory(trainer),
        "parameters": sum(p.numel() for p in trainer.model.parameters()),
        "losses": [row["train/CE loss"] for row in rows],
        "norms": [row["optim/total grad norm"] for row in rows],
    }


def traffic(log: CommLog, config: TrainConfig) -> dict[str, Any]:
    """What a rank sent in the step that ``log`` saw: ``bytes`` of weights and gradients, ``kinds`` by collective.

    The step's own small sums (losses and expert counts for the metrics, norms) are ``other`` and not in ``bytes``.
    ``kinds``: name -> [collectives, bytes], without the small ones; ``unknown``: operators that the log cannot count.
    """
    moe = config.model.moe
    small = 8 * (3 + len(config.model.moe_layers) * (3 + (moe.n_experts if moe else 0)))
    kinds: dict[str, list[int]] = {}
    other = 0
    for entry in log.entries:
        if entry.payload <= 64 or (entry.kind == "all_reduce" and entry.payload == small):
            other += entry.wire
            continue
        count = kinds.setdefault(entry.kind, [0, 0])
        count[0] += 1
        count[1] += entry.wire
    return {
        "bytes": sum(wire for _, wire in kinds.values()),
        "kinds": kinds,
        "other": other,
        "unknown": dict(log.unknown),
    }


def memory(trainer: Trainer) -> dict[str, int]:
    """Bytes of training state that this rank holds, by :data:`KINDS`, from the tensors themselves, after a step.

    FSDP stores the fp32 master in its shards: it counts as ``weights``, and ``masters`` is 0.
    """
    engine = trainer.engine
    if isinstance(engine, ShardedDataParallel):
        return engine.memory()
    parameters = engine.parameters.values()
    state = [s[name] for s in engine.optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    return {
        "weights": _local_bytes(parameters),
        "gradients": _local_bytes(p.grad for p in parameters if p.grad is not None),
        "masters": 0,
        "moments": _local_bytes(state),
    }


def _local_bytes(tensors: Iterable[Tensor]) -> int:
    local = [t.to_local() if hasattr(t, "to_local") else t for t in tensors]
    return sum(t.numel() * t.element_size() for t in local)


def wire_bytes(
    way: str, parameters: int, ranks: int, microbatches: int, weight_bytes: int = 2, shards: int = 0
) -> float:
    """Bytes that a rank sends in one step, in closed form; rings move (n - 1) / n of what is gathered or scattered.

    ``way``: "ddp" (fp32 gradients reduce-scattered and weights gathered once a step), "replicated" (gradients
    all-reduced, every rank updates everything), or "fsdp" (weights gathered for forward and again for backward, fp32
    gradients reduce-scattered, every microbatch). ``weight_bytes``: of a weight when it is gathered. ``shards``: FSDP's
    shard group where it is smaller than ``ranks`` (HSDP): then the shards' gradients are also all-reduced over the
    copies. Report, sections 4.1 and 4.2.
    """
    ring = (ranks - 1) / ranks
    if way == "ddp":
        return (4 + weight_bytes) * parameters * ring
    if way == "replicated":
        return 2 * 4 * parameters * ring
    if way != "fsdp":
        raise ConfigError(f"way is {way!r}, but must be 'ddp', 'replicated' or 'fsdp'")
    shards = shards or ranks
    if ranks % shards:
        raise ConfigError(f"shards is {shards}, which does not divide {ranks} ranks")
    copies = ranks // shards
    sharded = (2 * weight_bytes + 4) * parameters * (shards - 1) / shards
    return microbatches * (sharded + 2 * 4 * parameters / shards * (copies - 1) / copies)
