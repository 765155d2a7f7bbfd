"""Which GPU holds what: pipeline stage, experts, replicas, and the bytes of training state that follow.

World = pp x dp, pp outermost; expert parallelism is folded into dp with EP ranks as neighbours, dp = edp x ep (technical
report, section 7). Training state is 2 bytes a parameter for bf16 weights, 4 for fp32 gradients and 12 for the fp32
master and both AdamW moments, the last shared out over the parameter's own replicas: dp for dense parameters, edp for
experts (report, figure 9). Lessons: 00_start_here, 09_capacity_planner.
"""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass

from moe_lab.config import ModelConfig
from moe_lab.errors import ConfigError
from moe_lab.plan.parameters import count_parameters

WEIGHT_BYTES, GRADIENT_BYTES, OPTIMIZER_BYTES = 2, 4, 12


@dataclass(frozen=True)
class Degrees:
    """A layout of ``gpus`` = pp x dp, dp = edp x ep."""

    gpus: int
    pp: int
    dp: int
    ep: int
    edp: int


@dataclass(frozen=True)
class Holding:
    """What one GPU holds: coordinates, the layer indices of its stage, its experts (first, last + 1), parameters, bytes."""

    gpu: int
    stage: int
    edp: int
    ep: int
    layers: range
    experts: range
    dense_parameters: int
    expert_parameters: int
    weights: int
    gradients: int
    optimizer: int

    @property
    def state(self) -> int:
        """Bytes of training state in all."""
        return self.weights + self.gradients + self.optimizer


def degrees(config: ModelConfig, gpus: int, ep: int, pp: int) -> Degrees:
    """Check a layout and fill in dp and edp; :class:`ConfigError` with the two numbers that conflict."""
    experts = config.moe.n_experts if config.moe else 0
    for name, value in (("GPUs", gpus), ("ep", ep), ("pp", pp)):
        if value < 1:
            raise ConfigError(f"{name} is {value}, but must be at least 1")
    if gpus % pp:
        raise ConfigError(f"{pp} pipeline stages do not divide {gpus} GPUs")
    if pp > config.n_layers:
        raise ConfigError(f"{pp} pipeline stages are more than the {config.n_layers} layers")
    dp = gpus // pp
    if dp % ep:
        raise ConfigError(f"expert-parallel degree {ep} does not divide the {dp} GPUs of a pipeline stage")
    if ep > 1 and experts % ep:
        raise ConfigError(f"expert-parallel degree {ep} does not divide {experts} experts")
    return Degrees(gpus, pp, dp, ep, dp // ep)


def split_layers(n_layers: int, stages: int) -> list[range]:
    """Consecutive layers for each stage, as even as they go; the earlier stages take the rest, since the last has the head."""
    size, rest = divmod(n_layers, stages)
    starts = [stage * size + min(stage, rest) for stage in range(stages + 1)]
    return [range(a, b) for a, b in itertools.pairwise(starts)]


def holdings(config: ModelConfig, gpus: int, ep: int = 1, pp: int = 1) -> list[Holding]:
    """What each of ``gpus`` holds, in rank order."""
    d = degrees(config, gpus, ep, pp)
    counts = count_parameters(config)
    dense = set(config.dense_layers)
    moe_layers = max(1, len(config.moe_layers))
    attention_and_norms = (counts.attention + counts.norms) // config.n_layers
    result = []
    for gpu in range(gpus):
        stage, rank = divmod(gpu, d.dp)
        edp_rank, ep_rank = divmod(rank, d.ep)
        layers = split_layers(config.n_layers, d.pp)[stage]
        moe = sum(layer not in dense for layer in layers)
        local = attention_and_norms * len(layers) + (counts.router + counts.shared) // moe_layers * moe
        local += (counts.dense // len(dense)) * (len(layers) - moe) if dense else 0
        local += counts.embedding if stage == 0 else 0
        local += counts.head if stage == d.pp - 1 else 0
        share = config.moe.n_experts // d.ep if config.moe else 0
        expert = counts.routed // moe_layers // d.ep * moe
        result.append(
            Holding(
                gpu, stage, edp_rank, ep_rank, layers, range(ep_rank * share, (ep_rank + 1) * share), local, expert,
                weights=WEIGHT_BYTES * (local + expert),
                gradients=GRADIENT_BYTES * (local + expert),
                optimizer=OPTIMIZER_BYTES * local // d.dp + OPTIMIZER_BYTES * expert // d.edp,
            )
        )  # fmt: skip
    return result


def with_experts(config: ModelConfig, experts: int) -> ModelConfig:
    """``config`` with another number of experts of the same width: the active parameters stay."""
    if config.moe is None:
        raise ConfigError("this model has no experts to change the number of")
    return dataclasses.replace(config, moe=dataclasses.replace(config.moe, n_experts=experts))
