"""Data parallelism the Olmo-core 3 way: whole weights on each rank, gradients reduced once a step, optimizer state sharded.

Buckets, reducer and optimizer put together for one model. Lesson: 04_data_parallel.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from moe_lab.config import OptimConfig, ParallelConfig
from moe_lab.parallel.buckets import Piece, build_buckets
from moe_lab.parallel.mesh import Group, Mesh
from moe_lab.parallel.optimizer import ShardedAdamW
from moe_lab.parallel.reducer import Reducer


class ShardedDataParallel:
    """Owns the flat weights, gradients and optimizer state of ``model``.

    A step: :meth:`begin`; forward and backward of each microbatch, ``last = True`` before the last one's backward;
    :meth:`finish`; :meth:`step`. ``decays``: parameter name -> weight decay or not. ``weights``: the type that the model's
    parameters are kept in from here on; the masters start from what they were before.
    """

    loss_scale = 1.0

    def __init__(
        self,
        model: nn.Module,
        mesh: Mesh,
        parallel: ParallelConfig,
        optim: OptimConfig,
        decays: dict[str, bool],
        weights: torch.dtype | None = None,
    ) -> None:
        groups: dict[str, Group] = {"dense": mesh.dp, "expert": mesh.edp}

        def group_of(name: str) -> tuple[str, Group]:
            kind = "expert" if ".experts." in name else "dense"
            return kind, groups[kind]

        self.ep = mesh.ep
        elements = parallel.bucket_mib * 2**20 // 4  # gradients are fp32
        named = list(model.named_parameters())
        self.buckets = build_buckets(
            named, group_of, decays.__getitem__, elements, parallel.shard_optimizer, weights
        )
        self.reducer = Reducer(self.buckets, parallel.shard_optimizer)
        self.optimizer = ShardedAdamW(self.reducer, optim, mesh.everyone)

    @property
    def last(self) -> bool:
        """Whether the backward that comes is the step's last, after which buckets are reduced as they fill."""
        return self.reducer.last

    @last.setter
    def last(self, value: bool) -> None:
        """Say so before that backward."""
        self.reducer.last = value

    def begin(self) -> None:
        """Start a step: clear the gradients."""
        self.reducer.begin()

    def finish(self) -> None:
        """Wait until all gradients are reduced."""
        self.reducer.finish()

    def step(self, lr: float, loss: Tensor) -> tuple[Tensor, Tensor]:
        """Clip, update, gather the weights; (gradient norm before clipping, 1 if applied), on the device."""
        return self.optimizer.step(lr, loss)

    def state(self) -> list[Piece]:
        """Everything a checkpoint keeps of this engine, as live pieces: writing to them and :meth:`publish` restores it.

        By parameter ``NAME.master``, ``NAME.m`` and ``NAME.v``, each the part in this rank's shard and without the
        buckets' padding; then the count of applied steps and the window that spikes are judged by. Experts are
        numbered over all expert-parallel ranks, so a piece says where it belongs at any degree.
        """
        pieces = []
        for bucket, state in zip(self.buckets, self.optimizer.state):
            shard = bucket.shard
            for member in bucket.members:
                count = member.parameter.numel()
                first = max(member.start, shard.start)
                last = min(member.start + count, shard.stop)
                if first >= last:
                    continue
                experts = bucket.kind == "expert"
                size = count * (self.ep.size if experts else 1)
                offset = first - member.start + (count * self.ep.rank if experts else 0)
                local = slice(first - shard.start, last - shard.start)
                for leaf in ("master", "m", "v"):
                    pieces.append(Piece(f"{member.name}.{leaf}", size, offset, getattr(state, leaf)[local]))
        guard = self.optimizer.guard
        for key, value in (
            ("optimizer.steps", self.optimizer.steps),
            ("guard.values", guard.values),
            ("guard.seen", guard.seen),
        ):
            pieces.append(Piece(key, value.numel(), 0, value.view(-1)))
        return pieces

    def publish(self) -> None:
        """Make every rank's weights from the masters, after :meth:`state` was written to."""
        self.optimizer.publish()

    def memory(self) -> dict[str, int]:
        """Bytes this rank holds, by kind, from the tensors themselves."""
        state = self.optimizer.state
        own = [s for s, b in zip(state, self.buckets) if s.master.data_ptr() != b.weights[b.shard].data_ptr()]
        return {
            "weights": sum(_bytes(b.weights) for b in self.buckets),
            "gradients": sum(_bytes(b.gradients) for b in self.buckets),
            "masters": sum(_bytes(s.master) for s in own),
            "moments": sum(_bytes(s.m) + _bytes(s.v) for s in state),
        }


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def weight_decay_of(model: nn.Module, exempt: tuple[type[nn.Module], ...]) -> dict[str, bool]:
    """Parameter name -> whether weight decay applies: everywhere but in modules of the ``exempt`` classes."""
    decays = {}
    for prefix, module in model.named_modules():
        for leaf, _ in module.named_parameters(recurse=False):
            decays[f"{prefix}.{leaf}" if prefix else leaf] = not isinstance(module, exempt)
    return decays
