"""What was really communicated: every collective of a stretch of code, with its bytes, from torch's own dispatcher.

    with CommLog() as log:
        trainer.train_step()
    log.wire_bytes()

It sees the collectives of any library in the process (ours and FSDP2's alike), and counts rather than assumes.
Lesson: 04_data_parallel.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

# Collectives by torch's operator name -> (name, what a ring sends: of the input or the output, times (n - 1) / n).
_KINDS = {
    "allreduce_": ("all_reduce", 2.0),
    "_reduce_scatter_base_": ("reduce_scatter", 1.0),
    "_reduce_scatter_single_": ("reduce_scatter", 1.0),
    "_allgather_base_": ("all_gather", 1.0),
    "_allgather_single_": ("all_gather", 1.0),
    "alltoall_base_": ("all_to_all", 1.0),
}


@dataclass(frozen=True)
class Collective:
    """One collective: its kind, the bytes of its larger side (the whole of what is reduced or gathered), ranks, sent bytes."""

    kind: str
    payload: int
    ranks: int
    wire: int


class CommLog(TorchDispatchMode):
    """Collects :class:`Collective` entries in ``entries`` while active; scalar collectives (8 bytes or fewer) included."""

    def __init__(self) -> None:
        super().__init__()
        self.entries: list[Collective] = []
        self.unknown: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run ``func`` and note it if it is a collective."""
        result = func(*args, **(kwargs or {}))
        if func.namespace == "c10d":
            self._note(func.__name__.split(".")[0], args)
        return result

    def _note(self, name: str, args: tuple[Any, ...]) -> None:
        if name not in _KINDS:
            self.unknown[name] += 1
            return
        kind, factor = _KINDS[name]
        tensors = [
            t for a in args for t in (a if isinstance(a, (list, tuple)) else [a]) if isinstance(t, Tensor)
        ]
        group = next(g for g in map(_group, args) if g is not None)
        payload = max(t.numel() * t.element_size() for t in tensors)
        ranks = group.size()
        self.entries.append(Collective(kind, payload, ranks, round(factor * payload * (ranks - 1) / ranks)))

    def wire_bytes(self, smallest: int = 65) -> int:
        """Bytes this rank sends, as rings send them, in collectives of at least ``smallest`` bytes (scalars left out)."""
        return sum(entry.wire for entry in self.entries if entry.payload >= smallest)

    def by_kind(self) -> dict[str, tuple[int, int]]:
        """Kind -> (number of collectives, bytes sent)."""
        kinds: dict[str, tuple[int, int]] = {}
        for entry in self.entries:
            count, sent = kinds.get(entry.kind, (0, 0))
            kinds[entry.kind] = (count + 1, sent + entry.wire)
        return kinds


def _group(value: Any) -> Any:
    """The process group behind an operator's argument, or None."""
    if isinstance(value, torch.distributed.ProcessGroup):
        return value
    if isinstance(value, torch.ScriptObject):
        return torch.distributed.ProcessGroup.unbox(value)
    return None
