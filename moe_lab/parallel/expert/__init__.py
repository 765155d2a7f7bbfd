"""Expert parallelism: experts spread over neighbouring ranks, token rows travelling to them and back.

Every transport has the interface of :class:`~moe_lab.model.dispatch.ExpertTransport` and is held against
:class:`~moe_lab.model.dispatch.LocalTransport`: the same outputs and gradients. Lesson: 05_expert_parallel.
"""

from moe_lab.parallel.expert.all_to_all import AllToAllTransport

__all__ = ["AllToAllTransport"]
