"""Ranks in one process: the collectives of ``torch.distributed`` on lists of tensors, for ideas rather than speed.

Entry r of a list is what rank r holds. Nothing is changed in place, each rank gets memory of its own, and sums run in
rank order, so that a result depends on its input alone. ``collectives`` gives the results, ``ring`` shows how neighbours
arrive at them, a step at a time, with every byte counted. Lesson: 04_data_parallel.
"""

from moe_lab.sim.collectives import (
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    in_groups,
    reduce_scatter,
)
from moe_lab.sim.ring import (
    Transfer,
    Wire,
    ring_all_gather,
    ring_all_reduce,
    ring_reduce_scatter,
    ring_states,
)

__all__ = [
    "Transfer",
    "Wire",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "broadcast",
    "in_groups",
    "reduce_scatter",
    "ring_all_gather",
    "ring_all_reduce",
    "ring_reduce_scatter",
    "ring_states",
]
