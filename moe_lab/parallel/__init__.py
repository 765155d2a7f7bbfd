"""Where it is computed: how ranks share the work. Lesson: 04_data_parallel.

``mesh`` (who stands where), ``buckets`` (flat memory), ``reducer`` (gradients), ``optimizer`` (sharded AdamW), put together
in ``ddp``; ``fsdp`` is the baseline (imported where it is used: torch's FSDP2 takes a second to load); ``comm_log`` counts what is really sent.
"""

from moe_lab.parallel.comm_log import Collective, CommLog
from moe_lab.parallel.ddp import ShardedDataParallel, weight_decay_of
from moe_lab.parallel.mesh import Group, Mesh, rank_grid
from moe_lab.parallel.ranks import sum_over_ranks, world
from moe_lab.parallel.reducer import Reducer, gradient_of

__all__ = [
    "Collective",
    "CommLog",
    "Group",
    "Mesh",
    "Reducer",
    "ShardedDataParallel",
    "gradient_of",
    "rank_grid",
    "sum_over_ranks",
    "weight_decay_of",
    "world",
]
