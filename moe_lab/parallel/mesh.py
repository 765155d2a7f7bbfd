"""Where each rank stands: pipeline stage, replica, expert shard, and the groups it talks to.

World = pp x dp, pp outermost; each stage's dp ranks are reshaped to edp x ep, EP ranks being neighbours (technical
report, section 7). With one process there are no groups and nothing is communicated. Lesson: 04_data_parallel.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from moe_lab.config import ParallelConfig
from moe_lab.parallel.ranks import world


@dataclass(frozen=True)
class Group:
    """Some ranks that communicate: the process group (None for one rank alone), their number and this rank's place."""

    handle: dist.ProcessGroup | None
    size: int
    rank: int


ALONE = Group(None, 1, 0)


def rank_grid(config: ParallelConfig, ranks: int) -> Tensor:
    """Rank numbers as ``[pp, edp, ep]``: read along the last dimension for the ranks that share a layer's experts."""
    resolved = config.resolve(ranks)
    return torch.arange(ranks).view(resolved.pp, resolved.dp // resolved.ep, resolved.ep)


class Mesh:
    """The ranks of a run in one ``DeviceMesh`` with dimensions pp, edp, ep, and dp = edp x ep flattened.

    ``ranks``: :func:`rank_grid`. ``pp``, ``dp``, ``edp``, ``ep``: this rank's groups; ``everyone``: all ranks.
    """

    def __init__(self, config: ParallelConfig, device: str = "cpu") -> None:
        rank, size = world()
        self.ranks = rank_grid(config, size)
        self.device_mesh: DeviceMesh | None = None
        self.pp = self.dp = self.edp = self.ep = self.everyone = ALONE
        if size == 1:
            return
        self.device_mesh = init_device_mesh(
            device, tuple(self.ranks.shape), mesh_dim_names=("pp", "edp", "ep")
        )
        self.dp_mesh = self.device_mesh["edp", "ep"]._flatten("dp")
        self.pp, self.edp, self.ep = (self._group(self.device_mesh[name]) for name in ("pp", "edp", "ep"))
        self.dp = self._group(self.dp_mesh)
        self.everyone = Group(dist.group.WORLD, size, rank)

    @staticmethod
    def _group(mesh: DeviceMesh) -> Group:
        return Group(mesh.get_group(), mesh.size(), mesh.get_local_rank()) if mesh.size() > 1 else ALONE
