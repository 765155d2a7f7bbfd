"""What this version can train, and what a run's record says of how it runs: layout and implementations. Lesson: 00_start_here."""

from __future__ import annotations

from typing import Any

import torch

from moe_lab.config import ParallelConfig, TrainConfig
from moe_lab.errors import ConfigError
from moe_lab.ops import reference_only
from moe_lab.parallel import world

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16}


def layout(config: TrainConfig, parallel: ParallelConfig, ranks: int) -> dict[str, Any]:
    """The resolved layout (``parallel`` after ``resolve``), as the record states it."""
    return {
        "ranks": ranks, "dp": parallel.dp, "ep": parallel.ep, "pp": parallel.pp,
        "microbatches": config.microbatches_per_rank(parallel.dp),
        "microbatch_tokens": config.microbatch_sequences * config.sequence_length,
        "tokens_per_step": config.tokens_per_step, "threads_per_rank": torch.get_num_threads(),
    }  # fmt: skip


def paths(config: TrainConfig, parallel: ParallelConfig, device: torch.device) -> dict[str, Any]:
    """Which implementations run, as the record states it."""
    fsdp = parallel.data_parallel == "fsdp"
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    shards = (
        f"FSDP2 over {parallel.fsdp_shard or parallel.dp} of {parallel.dp} ranks"
        if fsdp
        else f"DDP over {parallel.dp} ranks, gradients reduced once a step"
    )
    if not fsdp and parallel.dp > 1:
        shards += (
            ", optimizer state sharded" if parallel.shard_optimizer else ", optimizer state on every rank"
        )
    return {
        "device": name,
        "precision": "bf16 weights, fp32 masters and gradients"
        if config.precision == "bf16"
        else config.precision,
        "ops": "reference" if reference_only() else "fast",
        "transport": parallel.transport if parallel.ep > 1 else "local",
        "data_parallel": shards,
    }


def check_supported(config: TrainConfig) -> None:
    """Refuse what this version cannot train, with one sentence, before anything starts."""
    p = config.parallel
    if config.precision not in DTYPES:
        raise ConfigError(
            f"TrainConfig.precision is {config.precision!r}, which this version describes but cannot train in: use {', '.join(DTYPES)}"
        )
    if p.data_parallel == "fsdp" and world()[1] == 1:
        raise ConfigError(
            "ParallelConfig.data_parallel is 'fsdp', which shards weights over ranks and needs at least 2, but this is 1"
        )
    if p.data_parallel == "fsdp" and config.checkpoint_every:
        raise ConfigError(
            f"TrainConfig.checkpoint_every is {config.checkpoint_every}, but data_parallel 'fsdp' is a baseline that keeps no "
            "checkpoints: set checkpoint_every=0 or data_parallel=ddp"
        )
    if p.transport not in ("local", "all_to_all") or p.pp > 1 or p.recompute != "none":
        raise ConfigError(
            f"ParallelConfig asks for transport {p.transport!r}, pp {p.pp} and recompute {p.recompute!r}, which this version "
            "describes but cannot train with: use transport=local or all_to_all, pp=1 and recompute=none"
        )
    if p.ep > 1 and config.initial_model:
        raise ConfigError(
            f"TrainConfig.initial_model is read whole in this version, but ep is {p.ep}: use ep=1"
        )
