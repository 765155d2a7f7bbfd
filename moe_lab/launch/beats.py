"""Heartbeats: where each rank was, and when, for the error message of a run that hangs.

A heartbeat is one fixed-size line in ``rank<k>.beat``, rewritten in place: no growth, no lock, a few microseconds. The
file outlives the rank, so whoever reads it afterwards knows what the rank was last doing.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

WIDTH = 200  # bytes of one record; a label longer than what fits is cut

_file: int | None = None


@dataclass(frozen=True)
class Beat:
    """The last word of a rank: ``time`` in seconds since the epoch, and the ``label`` it gave."""

    time: float
    label: str


def heartbeat(label: str) -> None:
    """Note that this rank is alive and at ``label``, for example ``"step 12, backward"``.

    Call it wherever a hang would be a riddle. Outside the ranks of :func:`moe_lab.launch.run` it does nothing.
    """
    if _file is None:
        return
    line = f"{time.time():.3f} {' '.join(label.split())}".encode()[: WIDTH - 1]
    os.pwrite(_file, line.ljust(WIDTH - 1) + b"\n", 0)


def start(path: str | Path) -> None:
    """Send this process's heartbeats to ``path``. The worker calls it once on each rank."""
    global _file
    _file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)


def read(path: str | Path) -> Beat | None:
    """The last heartbeat in ``path``; None if the rank never came as far as its first one."""
    try:
        stamp, _, label = Path(path).read_text(encoding="utf-8", errors="replace").strip().partition(" ")
        return Beat(float(stamp), label)
    except (OSError, ValueError):
        return None
