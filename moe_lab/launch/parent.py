"""Dying with the parent process, and adopting orphans. Nothing but the standard library, since the agent needs it before all else."""

from __future__ import annotations

import ctypes
import sys

PR_SET_PDEATHSIG = 1  # from <linux/prctl.h>
PR_SET_CHILD_SUBREAPER = 36


def die_with_parent(number: int) -> None:
    """Ask the operating system to send this process signal ``number`` when its parent dies; 0 takes it back.

    Linux only, elsewhere nothing happens. To Linux the parent is the *thread* that started this process.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent dies, so that this process can wait for their end. Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
