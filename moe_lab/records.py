"""What a run leaves behind: one folder, one ``record.json``, one ``metrics.jsonl``.

Every figure and every number that moe_lab shows comes from these files, so they can be compared months later.

``record.json`` (schema 1), written when the run starts and again whenever something is added:

=============  ========================================================================================================
``schema``     1
``run_id``     name of the run's folder
``kind``       ``notebook`` (a notebook job) or ``train`` (a training run; a notebook job can hold several, in subfolders)
``name``       notebook or preset name
``status``     ``running``, ``done``, ``failed``, ``timeout`` or ``killed``; a run whose process or machine was lost at once
               stays ``running``
``started``    UTC, ISO 8601; ``finished`` and ``seconds`` (wall clock) are null until the end
``parameters`` what the caller passed and what it resolved to: ``{name: value}``
``config``     the full training configuration, or null
``layout``     resolved ranks and degrees: ``{"ranks", "dp", "ep", "pp", "microbatches", ...}``, or null
``paths``      which implementation ran: ``{"device", "precision", "ops", "transport", ...}``, or null
``environment`` versions, machine and git revision, from :func:`environment`
``results``    named values recorded by :func:`record`
``notebook``   absolute path of the notebook that ran; only where ``kind`` is ``notebook``
``error``      null, or ``{"type", "message", "where"}``
=============  ========================================================================================================

``metrics.jsonl``: one JSON object a line, in order of time, each with ``step``; written as the run goes, so that a run
that is killed keeps all but the line it was writing. :func:`read_metrics` skips a torn last line.

Built in lesson 00_start_here; the notebook runner and the trainer both write through this module.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import platform
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from datetime import UTC, datetime
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any

from moe_lab.errors import DataError

SCHEMA = 1
RUN_DIR_VARIABLE = "MOE_LAB_RUN_DIR"  # set by the notebook runner; record() writes there
STATUSES = ("running", "done", "failed", "timeout", "killed")


def utc_now() -> str:
    """The time now, UTC, ISO 8601 with milliseconds."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def to_json(value: Any) -> Any:
    """``value`` as plain JSON types: tensors and arrays become numbers or lists, paths text, NaN and infinities text."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, dict):
        return {str(k): to_json(v) for k, v in value.items()}
    if isinstance(value, (list, tuple, set)):
        return [to_json(v) for v in value]
    if hasattr(value, "tolist"):  # torch tensors, numpy arrays and scalars
        return to_json(value.tolist())
    if hasattr(value, "to_dict"):
        return to_json(value.to_dict())
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    raise TypeError(
        f"a record holds plain values, tensors and arrays, but got {type(value).__name__}: {value!r}"
    )


def write_json(path: str | Path, value: Any) -> None:
    """Write ``value`` to ``path`` so that a reader sees the old file or the new one, never half of one."""
    path = Path(path)
    text = json.dumps(to_json(value), indent=1, ensure_ascii=False) + "\n"
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the folder's lock: the runner and the notebook's kernel both change one ``record.json``."""
    with open(folder / ".record.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


class RunRecord:
    """``record.json`` and ``metrics.jsonl`` of one run folder.

    ``RunRecord.create(folder, kind=..., name=...)`` starts one, ``RunRecord.open(folder)`` goes on with one.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.path = self.folder / "record.json"

    @classmethod
    def create(cls, folder: str | Path, *, kind: str, name: str, **fields: Any) -> RunRecord:
        """Make ``folder`` and write its first record with ``status`` "running".

        Raises :class:`DataError` if the folder already holds a record or cannot be written.
        """
        run = cls(folder)
        try:
            run.folder.mkdir(parents=True, exist_ok=True)
            if run.path.exists():
                raise DataError(
                    f"{run.path} already exists: a run never overwrites another, choose another folder"
                )
            blank = dict.fromkeys(("finished", "seconds", "config", "layout", "paths", "error"))
            first: dict[str, Any] = {
                "schema": SCHEMA, "run_id": run.folder.name, "kind": kind, "name": name, "status": "running",
                "started": utc_now(), **blank, "parameters": {}, "environment": environment(), "results": {}, **fields,
            }  # fmt: skip
            with _locked(run.folder):
                write_json(run.path, first)
        except OSError as error:
            raise DataError(f"cannot write the run folder {run.folder}: {error.strerror or error}") from error
        return run

    @classmethod
    def open(cls, folder: str | Path) -> RunRecord:
        """The record of an existing run folder; :class:`DataError` if there is none."""
        run = cls(folder)
        run.read()
        return run

    def read(self) -> dict[str, Any]:
        """The record as it is on disk now."""
        try:
            value = json.loads(self.path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise DataError(f"{self.folder} holds no record.json: it is not a run folder") from None
        except (OSError, ValueError) as error:
            raise DataError(f"{self.path} cannot be read as JSON: {error}") from None
        if not isinstance(value, dict) or value.get("schema") != SCHEMA:
            raise DataError(
                f"{self.path} has schema {value.get('schema') if isinstance(value, dict) else None}, but this version reads {SCHEMA}"
            )
        return value

    def update(self, *, results: dict[str, Any] | None = None, **fields: Any) -> None:
        """Set top-level ``fields`` and merge ``results`` into the record, keeping what others wrote."""
        with _locked(self.folder):
            value = self.read()
            value.update(to_json(fields))
            value["results"].update(to_json(results or {}))
            write_json(self.path, value)

    def finish(self, status: str, *, error: dict[str, Any] | None = None, **fields: Any) -> None:
        """Close the record with ``status`` (one of :data:`STATUSES`), the end time and the seconds since the start."""
        assert status in STATUSES, status
        started = datetime.fromisoformat(self.read()["started"])
        seconds = round((datetime.now(UTC) - started).total_seconds(), 3)
        self.update(status=status, error=error, finished=utc_now(), seconds=seconds, **fields)

    def log(self, **metrics: Any) -> None:
        """Append one line to ``metrics.jsonl``. One process of a run calls this."""
        with open(self.folder / "metrics.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps(to_json(metrics), ensure_ascii=False) + "\n")

    def metrics(self) -> list[dict[str, Any]]:
        """All whole lines of ``metrics.jsonl``."""
        return read_metrics(self.folder / "metrics.jsonl")


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """The objects in a ``metrics.jsonl`` in order; a last line torn by a kill is left out."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return []
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(lines, 1):
        try:
            rows.append(json.loads(line))
        except ValueError:
            if number < len(lines):
                raise DataError(f"{path}, line {number} is not JSON: the file is damaged") from None
    return rows


_in_memory: dict[str, Any] = {}


def current_run() -> RunRecord | None:
    """The run folder that the notebook runner gave this process, or None in an interactive session."""
    folder = os.environ.get(RUN_DIR_VARIABLE)
    return RunRecord(folder) if folder else None


def record(**results: Any) -> dict[str, Any]:
    """Keep named results of a notebook: in its job's ``record.json``, or in memory in an interactive session.

    Returns everything recorded so far. Values are numbers, text, lists, dicts, tensors or arrays.
    """
    values = to_json(results)
    _in_memory.update(values)
    run = current_run()
    if run is not None:
        run.update(results=values)
    return dict(_in_memory)


def run_folder(name: str, parent: str | Path = "runs") -> Path:
    """A new folder name for a run: ``<parent>/<UTC time>-<name>-<id>``. Inside a notebook job: a subfolder of the job's."""
    job = os.environ.get(RUN_DIR_VARIABLE)
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S")
    unique = f"{stamp}-{name}-{os.urandom(3).hex()}"
    return Path(job) / unique if job else Path(parent) / unique


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _git(*arguments: str) -> str | None:
    try:
        folder = Path(__file__).resolve().parent
        done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


@lru_cache(maxsize=1)
def environment() -> dict[str, Any]:
    """Versions, machine and git revision of this process. Never initialises CUDA; GPUs are listed by the ranks."""
    revision = _git("rev-parse", "HEAD")
    return {
        "moe_lab": _version("moe_lab"), "git": revision,
        "git_modified": bool(_git("status", "--porcelain", "--untracked-files=no")) if revision else None,
        "python": platform.python_version(), "executable": sys.executable, "platform": platform.platform(),
        "host": socket.gethostname(), "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        **{package: _version(package) for package in ("torch", "triton", "numpy", "papermill", "jupyterlab", "transformers")},
    }  # fmt: skip
