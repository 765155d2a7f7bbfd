"""The files through which ranks, agent and kernel talk, and what may be written in them.

One run has one folder, and every rank ``k`` has four files in it:

================  =====================================================================================
``rank<k>.log``   everything the rank printed, standard output and standard error in their order
``rank<k>.json``  its report, written once at the end: its result, or its error with the traceback
``rank<k>.beat``  its last heartbeat (:mod:`~moe_lab.launch.beats`)
``rank<k>.stack``  the Python stack of every thread of a rank that had to be stopped
================  =====================================================================================

Plain JSON and text, no pickles: results do not depend on what the reader has imported, and stay readable by people.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

KINDS = ("log", "json", "beat", "stack")


def rank_file(folder: str | Path, rank: int, kind: str) -> Path:
    """Path of a rank's file; ``kind`` is one of :data:`KINDS`."""
    return Path(folder) / f"rank{rank}.{kind}"


def clear(folder: Path) -> None:
    """Remove the rank files of an earlier run, so that none of its results can be taken for one of this run."""
    for kind in KINDS:
        for path in folder.glob(f"rank*.{kind}"):
            if path.stem.removeprefix("rank").isdecimal():
                path.unlink()


def write_report(folder: str | Path, rank: int, report: dict[str, Any]) -> None:
    """Write ``rank<k>.json``: it is there whole or not at all."""
    path = rank_file(folder, rank, "json")
    temporary = path.with_suffix(".json.tmp")
    temporary.write_text(json.dumps(report), encoding="utf-8")
    os.replace(temporary, path)


def read_report(folder: str | Path, rank: int) -> dict[str, Any] | None:
    """What rank ``rank`` reported, or None while it has not."""
    try:
        report: dict[str, Any] = json.loads(rank_file(folder, rank, "json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    return report


def not_json(value: Any, name: str) -> str | None:
    """Why ``value`` cannot cross to another process as JSON, naming the place inside it; None if it can.

    Allowed: None, bool, int, float (NaN and infinities too), str, and lists, tuples (they arrive as lists) and dicts
    with text keys of these. A dict with other keys is refused, since JSON would turn the keys into text in silence.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return None
    if isinstance(value, (list, tuple)):
        parts = [not_json(part, f"{name}[{place}]") for place, part in enumerate(value)]
    elif isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                return f"{name} has the key {key!r}, but keys must be text"
        parts = [not_json(part, f"{name}[{key!r}]") for key, part in value.items()]
    else:
        hint = "; use .tolist() or .item()" if hasattr(value, "tolist") else ""
        hint = hint or ("; use str()" if isinstance(value, os.PathLike) else "")
        return f"{name} is a {type(value).__name__}, but only None, numbers, text, lists and dicts of them can be passed{hint}"
    return next((part for part in parts if part), None)
