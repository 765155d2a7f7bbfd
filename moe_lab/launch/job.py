"""Notebook jobs: run a notebook from start to end, keep what it showed, and say how it ended.

``run_notebook("notebooks/00_start_here.ipynb", {"ranks": 2})``, or ``moe-lab run`` on a command line, checks the
parameters, makes the folder ``runs/<UTC>-<notebook>-<id>/`` and executes the notebook in a process of its own
(:mod:`moe_lab.launch.notebook`):

==================  ==================================================================================================
``notebook.ipynb``  the executed notebook, saved after every cell and, while a cell prints, every half minute
``record.json``     :class:`~moe_lab.records.RunRecord` of kind ``notebook``: parameters as resolved, status, the error and
                    its cell, and what the notebook kept with :func:`moe_lab.records.record`
``kernel.log``      what the kernel and its libraries wrote past the notebook; absent if that is nothing
==================  ==================================================================================================

The notebook's working directory is the caller's, as for a script, so that a relative path means what it means in the
shell. Its kernel is the one of this Python environment. One deadline, ``timeout_s``, holds for the whole run. At the
deadline, or when this process gets SIGTERM, SIGHUP or SIGINT, the kernel is interrupted, then killed, and every
process that it started goes with it; what ran is kept, and the record says ``timeout`` or ``killed``. A second signal
skips the waiting. Built in lesson 00_start_here.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil

from moe_lab.errors import ConfigError, LaunchError
from moe_lab.launch.parameters import declared, read_notebook, resolve
from moe_lab.records import RUN_DIR_VARIABLE, RunRecord, run_folder

GRACE_S = 5.0  # from the interrupt of a kernel to its kill
SAVE_S = 5.0  # for papermill to save the notebook after that
EXIT_FAILED, EXIT_TIMEOUT, EXIT_KERNEL_DIED = 1, 124, 138
TITLE_WIDTH = 60


class NotebookError(LaunchError):
    """A notebook job that did not end well.

    ``folder``: what it left behind; ``status``: as in its record; ``exit_status``: 1 for a cell that failed, 124 for the
    deadline, 138 for a kernel that died, 128 + n for signal n.
    """

    def __init__(self, message: str, *, folder: Path, status: str, exit_status: int) -> None:
        super().__init__(message)
        self.folder = folder
        self.status = status
        self.exit_status = exit_status


def run_notebook(
    notebook: str | Path,
    parameters: Mapping[str, object] | None = None,
    *,
    out: str | Path = "runs",
    timeout_s: float | None = None,
    show: bool = True,
) -> Path:
    """Execute ``notebook`` as a job and return its run folder, a new one under ``out``.

    ``parameters``: values for names in the notebook's ``parameters`` cell, as Python values or as a command line's
    text. ``timeout_s``: seconds for the whole run. ``show``: print one line a cell, at times the last line that a long cell
    printed, and at the end what was recorded.

    Raises :class:`ConfigError` for a notebook or parameters that cannot be used and :class:`DataError` for an ``out``
    that cannot be written, both before anything starts; :class:`NotebookError` for a run that did not end well.
    """
    notebook = Path(notebook)
    if timeout_s is not None and not timeout_s > 0:
        raise ConfigError(f"the time limit of a run is a positive number of seconds, but got {timeout_s}")
    known = declared(read_notebook(notebook), str(notebook))
    passed = resolve(known, parameters or {}, str(notebook))
    name = re.sub(r"[^\w.-]+", "_", notebook.stem)
    with _signals() as signals:
        folder = run_folder(name, out)
        record = RunRecord.create(
            folder,
            kind="notebook",
            name=name,
            parameters={key: passed.get(key, parameter.default) for key, parameter in known.items()},
            notebook=str(notebook.resolve()),
        )
        run = _Run(notebook, folder, passed, record, show)
        try:
            run.follow(timeout_s, signals)
        except BaseException as error:  # this process itself cannot go on, as when its terminal is gone
            record.finish(
                "killed",
                error={
                    "type": type(error).__name__,
                    "message": str(error),
                    "where": run.where.removeprefix("in "),
                },
            )
            raise
        finally:
            run.sweep()
        run.close()
    return folder


class _Run:
    """One job from the start of its process to the last line of its record."""

    def __init__(
        self, notebook: Path, folder: Path, passed: dict[str, Any], record: RunRecord, show: bool
    ) -> None:
        self.folder, self.record, self.show = folder, record, show
        self.name = notebook.name
        self.executed = folder / "notebook.ipynb"
        self.spec = {
            "notebook": str(notebook.resolve()),
            "output": str(self.executed.resolve()),
            "parameters": passed,
            "grace_s": GRACE_S,
        }
        self.cell = ""  # the cell that runs, or ran last
        self.line = ""
        self.in_line = False  # a cell's line is on the terminal, its seconds are not
        self.end: dict[str, Any] | None = None  # the child's last word
        self.stopped: str | None = None  # "timeout" or "killed"
        self.signal = 0

    @property
    def where(self) -> str:
        """How far the run got."""
        return f"in {self.cell}" if self.cell else "before its first cell"

    def follow(self, timeout_s: float | None, signals: int) -> None:
        """Start the child and read its events until it is through, told to stop, or out of time."""
        self.started = time.monotonic()
        self.timeout_s = timeout_s
        reading, writing = os.pipe()
        environment = {**os.environ, RUN_DIR_VARIABLE: str(self.folder.resolve())}
        environment.pop("MPLBACKEND", None)  # the kernel chooses inline figures only where this is unset
        command = [sys.executable, "-m", "moe_lab.launch.notebook", json.dumps(self.spec), str(writing)]
        with open(self.folder / "kernel.log", "wb") as log:
            self.child = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=log, stderr=log, env=environment,
                pass_fds=[writing], start_new_session=True,
            )  # fmt: skip
            os.close(writing)
            try:
                self._read(reading, signals, timeout_s)
            finally:
                os.close(reading)

    def _read(self, events: int, signals: int, timeout_s: float | None) -> None:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        buffer = b""
        while True:
            wait = None if deadline is None else max(0.0, deadline - time.monotonic())
            ready = select.select([events, signals], [], [], wait)[0]
            if events in ready:
                data = os.read(events, 65536)
                if not data:
                    return
                *lines, buffer = (buffer + data).split(b"\n")
                for line in lines:
                    self._on_event(json.loads(line))
                if self.end is not None:
                    deadline = time.monotonic() + SAVE_S  # for the process to end
                continue
            if self.stopped or self.end:
                return  # a second signal, or the grace is over
            if signals in ready:
                self.signal = os.read(signals, 1)[0]
            self._stop("killed" if self.signal else "timeout")
            deadline = time.monotonic() + GRACE_S + SAVE_S

    def _stop(self, status: str) -> None:
        """Ask the child to stop; the record says so first, in case this process does not live to see the end."""
        self.stopped = status
        assert self.child.stdin is not None
        self.child.stdin.close()
        self.record.update(status=status)

    def _on_event(self, event: dict[str, Any]) -> None:
        if event["event"] == "cell":
            self.cell = f"cell {event['number']} of {event['of']} ({event['title']})"
            width = len(str(event["of"]))
            title = event["title"][:TITLE_WIDTH]
            self.line = f"[{event['number']:>{width}}/{event['of']}] {title:<{TITLE_WIDTH}}"
            self._print(self.line, end="")
            self.in_line = True
        elif event["event"] == "text":
            self._end_line()
            self._print(f"    {event['line']}")
        elif event["event"] == "cell_done":
            self._print(f"{'' if self.in_line else self.line} {event['seconds']:8.1f} s")
            self.in_line = False
        else:
            self.end = event

    def _end_line(self) -> None:
        if self.in_line:
            self._print("")
        self.in_line = False

    def _print(self, text: str, end: str = "\n") -> None:
        if self.show:
            print(text, end=end, flush=True)

    def sweep(self) -> None:
        """End whatever the run left running: its own process, the kernel, ranks, and what those started.

        They are found as descendants and by the run's folder in their environment, so that a process whose parent has
        gone, or that made a session of its own, is found too.
        """
        if not hasattr(self, "child"):
            return
        left = _processes_of(self.child.pid, str(self.folder.resolve()))
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.terminate()
        _, alive = psutil.wait_procs(left, timeout=2)
        for process in {*alive, *_processes_of(self.child.pid, str(self.folder.resolve()))}:
            with contextlib.suppress(psutil.Error):
                process.kill()
        self.child.wait()

    def close(self) -> None:
        """Write the last record, say where everything is, and raise for a run that did not end well."""
        self._end_line()
        log = self.folder / "kernel.log"
        if log.stat().st_size == 0:
            log.unlink()
        status, exit_status, error, message = self._verdict()
        self.record.finish(status, error=error)
        seconds = time.monotonic() - self.started
        self._print(
            f"{status} in {seconds:.1f} s: {self.executed if self.executed.exists() else self.folder}"
        )
        scalars = {k: v for k, v in self.record.read()["results"].items() if not isinstance(v, (list, dict))}
        width = max(map(len, scalars), default=0)
        for key, value in scalars.items():
            self._print(
                f"  {key:<{width}}  {value:.6g}" if isinstance(value, float) else f"  {key:<{width}}  {value}"
            )
        if status != "done":
            raise NotebookError(message, folder=self.folder, status=status, exit_status=exit_status)

    def _verdict(self) -> tuple[str, int, dict[str, Any] | None, str]:
        """Status, exit status, the record's error, and the message for people."""
        kept = f"what ran is in {self.executed}"
        if self.stopped == "timeout":
            why = f"stopped at its time limit of {self.timeout_s:g} s {self.where}"
            return "timeout", EXIT_TIMEOUT, self._error("Timeout", why), f"{self.name} was {why}; {kept}"
        if self.stopped:
            why = f"stopped by {signal.Signals(self.signal).name} {self.where}"
            return "killed", 128 + self.signal, self._error("Signal", why), f"{self.name} was {why}; {kept}"
        outcome = self.end["outcome"] if self.end else "process_died"
        if outcome == "done":
            return "done", 0, None, ""
        if outcome == "failed":
            assert self.end is not None
            found = self.end["error"]
            message = f"{self.name} failed {self.where}; {kept}\n\n{found['traceback']}"
            return "failed", EXIT_FAILED, self._error(found["type"], found["message"]), message
        log = self.folder / "kernel.log"
        details = f"{kept}, and {log} may say more" if log.exists() else kept
        if outcome == "kernel_died":
            why = f"its kernel died {self.where}, as it does when the machine's memory runs out"
            return (
                "failed",
                EXIT_KERNEL_DIED,
                self._error("KernelDied", why),
                f"{self.name}: {why}; {details}",
            )
        if self.end:
            found = self.end["error"]
            why = f"{found['type']}: {found['message']}"
            error = self._error(found["type"], found["message"])
            return (
                "failed",
                EXIT_FAILED,
                error,
                f"{self.name} could not be run, {self.where}: {why}; {details}",
            )
        why = f"its process ended with status {self.child.returncode} {self.where}"
        return "failed", EXIT_FAILED, self._error("ProcessDied", why), f"{self.name}: {why}; {details}"

    def _error(self, kind: str, message: str) -> dict[str, Any]:
        return {"type": kind, "message": message, "where": self.where.removeprefix("in ")}


def _processes_of(child: int, folder: str) -> set[psutil.Process]:
    """The processes of a run that still exist, as :meth:`_Run.sweep` describes them."""
    found = set()
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(child)
        found.update([process, *process.children(recursive=True)])
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            place = process.environ().get(RUN_DIR_VARIABLE, "")
            if place == folder or place.startswith(folder + os.sep):
                found.add(process)
    return {process for process in found if process.pid != os.getpid()}


@contextlib.contextmanager
def _signals() -> Iterator[int]:
    """A file descriptor on which SIGINT, SIGTERM and SIGHUP arrive as one byte each, instead of ending this process.

    Signals that are ignored, as under nohup, stay ignored. Outside the main thread the descriptor stays silent.
    """
    reading, writing = os.pipe()
    before = {}

    def pass_on(number: int, _: object) -> None:
        os.write(writing, bytes([number]))

    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:
                before[number] = signal.signal(number, pass_on)
    try:
        yield reading
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(reading)
        os.close(writing)
