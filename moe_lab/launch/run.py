"""``run``: one function, called on every rank of a fresh process group, from a notebook cell."""

from __future__ import annotations

import math
import os
import shutil
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from moe_lab.errors import ConfigError, LaunchError
from moe_lab.launch import client, diagnose, files, target

BACKENDS = ("auto", "gloo", "nccl", "cpu:gloo,cuda:nccl")


def run(
    fn: Callable[..., dict[str, Any] | None] | str,
    /,
    *,
    ranks: int,
    timeout_s: float = 60,
    backend: str = "auto",
    threads: int | None = None,
    run_dir: str | Path | None = None,
    show: bool = True,
    env: Mapping[str, str] | None = None,
    **kwargs: Any,
) -> list[dict[str, Any]]:
    """Call ``fn(**kwargs)`` on ``ranks`` processes of this machine; return their results in the order of rank.

    On each rank the process group exists before ``fn`` is called, and ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``,
    ``LOCAL_WORLD_SIZE``, ``MASTER_ADDR`` and ``MASTER_PORT`` are set as torchrun sets them. Ranks see this process's
    working directory, import path and environment as they are now, and import ``fn``'s module anew in each call.

    - ``fn``: an importable function, or ``"package.module:function"``; returns a dict of JSON values, or None for ``{}``.
    - ``kwargs``: JSON values (tuples arrive as lists).
    - ``timeout_s``: seconds from the start of the ranks to the end of the last one. A collective gets half of that, so
      that a rank missing from it is named before the call as a whole runs out.
    - ``backend``: ``auto`` takes NCCL (with gloo for CPU tensors) where each rank has a GPU of its own, else gloo.
    - ``threads``: torch threads a rank; default: the cores shared out evenly, at least one.
    - ``run_dir``: folder for the ranks' files (:mod:`moe_lab.launch.files`), kept. Default: a temporary one, kept only
      if the call fails; the error names it.
    - ``show``: print what rank 0 prints, as it comes.
    - ``env``: environment variables to set on the ranks.

    Raises :class:`~moe_lab.errors.ConfigError` before anything starts; :class:`~moe_lab.errors.RankError` for the rank
    that raised or died first; :class:`~moe_lab.errors.RankTimeout` for the one that hung;
    :class:`~moe_lab.errors.LaunchError` if ranks cannot be started. Whatever happens, an interrupt of the cell or the
    end of this process included, no rank stays behind. Used from lesson 00_start_here on; built up in 04_data_parallel.
    """
    reference = target.reference(fn, kwargs)
    _check(ranks, timeout_s, backend, threads, env)
    if problem := next(
        (text for name, value in kwargs.items() if (text := files.not_json(value, f"argument {name}"))), None
    ):
        raise ConfigError(f"{problem} (arguments reach the ranks as JSON)")
    folder = _folder(run_dir)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    call = {
        "id": uuid.uuid4().hex, "target": reference, "arguments": kwargs, "ranks": ranks, "timeout_s": timeout_s,
        "group_timeout_s": group_timeout(timeout_s), "backend": backend, "threads": threads or max(1, cores // ranks),
        "run_dir": str(folder), "environment": dict(os.environ), "extra_environment": dict(env or {}),
        "directory": os.getcwd(), "path": [str(entry) for entry in sys.path],
    }  # fmt: skip
    tail = client.Tail(files.rank_file(folder, 0, "log")) if show else None
    keep = run_dir is not None
    try:
        with client.warm_agent() as agent:
            call["started"] = time.time()
            answer = agent.call(call, tail or (lambda: None))
        if tail:
            tail(last=True)
        if answer["ended"] == "refused":
            raise LaunchError(f"{ranks} ranks could not be started: {answer['reason']}; try fewer ranks")
        reports = [files.read_report(folder, rank) for rank in range(ranks)]
        results = [report["result"] for report in reports if report and report["ok"]]
        if len(results) < ranks:
            keep = True
            raise diagnose.failure(call, answer)
        return results
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)


def group_timeout(timeout_s: float) -> float:
    """Seconds a collective may take in a call of ``timeout_s``: half, but not under 5 unless that is most of the call."""
    return min(max(timeout_s / 2, 5.0), timeout_s * 0.8)


def _check(
    ranks: int, timeout_s: float, backend: str, threads: int | None, env: Mapping[str, str] | None
) -> None:
    """Raise :class:`ConfigError` for the first argument of :func:`run` that cannot be used."""
    for name, value in (("ranks", ranks), ("threads", 1 if threads is None else threads)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"{name} must be a whole number of at least 1, but is {value!r}")
    if (
        isinstance(timeout_s, bool)
        or not isinstance(timeout_s, (int, float))
        or not (0 < timeout_s < math.inf)
    ):
        raise ConfigError(f"timeout_s must be a number of seconds above 0, but is {timeout_s!r}")
    if backend not in BACKENDS:
        raise ConfigError(f"backend must be one of {', '.join(BACKENDS)}, but is {backend!r}")
    for variable, content in (env or {}).items():
        if not isinstance(variable, str) or not isinstance(content, str):
            raise ConfigError(f"env maps names to text, but has {variable!r}: {content!r}")


def _folder(run_dir: str | Path | None) -> Path:
    """The folder for the ranks' files, emptied of those of an earlier run."""
    if run_dir is None:
        return Path(tempfile.mkdtemp(prefix="moe_lab-ranks-"))
    folder = Path(run_dir).absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        files.clear(folder)
        files.rank_file(folder, 0, "log").touch()
    except OSError as error:
        raise ConfigError(
            f"run_dir {folder} cannot be written: {error.strerror or error}; choose another folder"
        ) from error
    return folder
