"""Gradients: accumulated in flat fp32 buffers over a step's microbatches, reduced once, while backward still runs.

Matrix products add their weight gradients through a :class:`~moe_lab.ops.gradient.GradientSlot`; hooks do the same for the
few parameters that no product of ours owns (gains, embedding, router). In the last microbatch each parameter counts off its
uses; a bucket whose parameters are all done is reduced at once, always in bucket order, so that every rank issues the same
collectives. :meth:`Reducer.finish` starts whatever is left: parameters that got no gradient count as zero, on whichever rank.

Sums, not means: the loss is divided by the step's labels beforehand. Expert gradients are summed over the expert's replicas
only; the tokens of the other ranks have reached them through the transport already. Report, section 4.4.
Lesson: 04_data_parallel.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moe_lab.ops.gradient import GradientSlot, set_slot
from moe_lab.parallel.buckets import Bucket
from moe_lab.parallel.ranks import start_reduce_scatter


class Reducer:
    """Owns the gradient side of ``buckets``. A step: :meth:`begin`, backwards with ``last`` set before the final one, :meth:`finish`.

    ``sharded``: reduce-scatter, each rank keeps the sum of its shard; otherwise all-reduce, each keeps all of it.
    A parameter may carry ``gradient_uses``, the number of times a backward adds to it (1 unless tied).
    """

    def __init__(self, buckets: list[Bucket], sharded: bool) -> None:
        self.buckets = buckets
        self.sharded = sharded
        self.last = False
        self._waiting: list[int] = []
        self._uses: list[dict[str, int]] = []
        self._next = 0
        self._works: list[dist.Work] = []
        for index, bucket in enumerate(buckets):
            for member in bucket.members:
                slot = GradientSlot(bucket.view(bucket.gradients, member), self._marker(index, member.name))
                set_slot(member.parameter, slot)
                member.parameter.register_post_accumulate_grad_hook(self._take_gradient)
        self.begin()

    def _marker(self, index: int, name: str):  # type: ignore[no-untyped-def]
        return lambda: self._mark(index, name)

    @staticmethod
    def _take_gradient(parameter: Tensor) -> None:
        """Hook: autograd made a ``.grad``; move it into the buffer."""
        if parameter.grad is None:
            return  # a product of ours used it and has added and marked; autograd calls the hook all the same
        slot: GradientSlot = parameter.gradient_slot  # type: ignore[attr-defined]
        slot.add(parameter.grad)
        parameter.grad = None
        slot.mark()

    def begin(self) -> None:
        """Start a step: clear the buffers and forget what was marked."""
        for bucket in self.buckets:
            bucket.gradients.zero_()
        self.last = False
        self._next = 0
        self._waiting = [len(bucket.members) for bucket in self.buckets]
        self._uses = [
            {m.name: getattr(m.parameter, "gradient_uses", 1) for m in bucket.members}
            for bucket in self.buckets
        ]

    def _mark(self, index: int, name: str) -> None:
        if not self.last:
            return
        self._uses[index][name] -= 1
        if self._uses[index][name] == 0:
            self._waiting[index] -= 1
            while self._next < len(self.buckets) and self._waiting[self._next] == 0:
                self._reduce(self.buckets[self._next])
                self._next += 1

    def _reduce(self, bucket: Bucket) -> None:
        if bucket.group.size == 1:
            return
        if self.sharded:
            own = bucket.gradients[bucket.shard]
            # In place: the shard is where the sum of it belongs. gloo writes its result only after reading its input.
            work = start_reduce_scatter(own, bucket.gradients, bucket.group.handle)
        else:
            work = dist.all_reduce(bucket.gradients, group=bucket.group.handle, async_op=True)
        self._works.append(work)

    def finish(self) -> None:
        """Reduce what backward did not, in order, and wait (on a CUDA device: make the current stream wait)."""
        for bucket in self.buckets[self._next :]:
            self._reduce(bucket)
        self._next = len(self.buckets)
        for work in self._works:
            work.wait()
        self._works.clear()

    def squared_norm(self) -> Tensor:
        """This rank's share of the squared norm of all reduced gradients: each element counts once over all ranks."""
        parts = []
        for bucket in self.buckets:
            own = bucket.gradients[bucket.shard]
            copies = 1 if self.sharded else bucket.group.size
            parts.append(torch.linalg.vector_norm(own).square().double() / copies)
        return torch.stack(parts).sum()


def gradient_of(parameter: nn.Parameter) -> Tensor:
    """The accumulated gradient of a parameter that a reducer owns, in the parameter's shape (fp32 at least)."""
    slot: GradientSlot = parameter.gradient_slot  # type: ignore[attr-defined]
    return slot.total
