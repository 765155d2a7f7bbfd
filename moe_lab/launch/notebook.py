"""Execute one notebook in this process with papermill: the child process of a notebook job.

:mod:`moe_lab.launch.job` starts ``python -m moe_lab.launch.notebook SPEC EVENT_FD`` and reads one JSON object a line from
the pipe ``EVENT_FD``: ``{"event": "cell", "number", "of", "title"}`` when a code cell starts, ``{"event": "text", "line"}``
now and then while a long one prints, ``{"event": "cell_done", "seconds"}`` when it is through, and at the end ``{"event":
"end", "outcome", "error"}``. The parent asks it to stop by closing its standard input, which also happens when the
parent dies; then the kernel is interrupted, and killed where that has no effect within the grace, and papermill saves
what ran. A process and not a thread, since papermill changes the working
directory of its process and a kernel that hangs has to be left behind.

The kernel is always the one of this Python environment, whatever the notebook's metadata and the user's installed
kernels say, and talks through sockets in a private folder, so that jobs started together never race for a port.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import nbformat
import papermill
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import AsyncKernelManager
from nbclient.exceptions import DeadKernelError
from papermill.exceptions import PapermillExecutionError
from papermill.execute import ERROR_MARKER_TAG
from papermill.iorw import LocalHandler, papermill_io

START_TIMEOUT_S = 120  # a kernel on a cold shared file system takes its time
QUIET_S = 2.0  # a cell that runs for longer has its printed lines passed on
LINE_EVERY_S = 1.0  # at most one in this time
SOCKET_PATH_LIMIT = 100  # bytes; the systems' own limits are 104 and 108
_ANSI = re.compile(r"\x1b\[[0-9;]*m")


class OwnKernel(AsyncKernelManager):
    """A kernel of the running Python environment; ``OwnKernel.current`` is the one of this process."""

    current: OwnKernel | None = None
    folder: str  # private folder of the sockets, set before the first kernel

    def __init__(self, **options: Any) -> None:
        connection = os.path.join(self.folder, "kernel.json")
        if len(connection) < SOCKET_PATH_LIMIT:
            options["transport"] = "ipc"
        super().__init__(connection_file=connection, **options)
        OwnKernel.current = self

    @property
    def kernel_spec(self) -> KernelSpec:
        """The kernel specification, made here instead of searched for."""
        argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        return KernelSpec(argv=argv, display_name="Python 3 (ipykernel)", language="python")

    async def _async_interrupt_kernel(self) -> None:
        """Nothing: before a shutdown the manager would interrupt the idle kernel, which writes an error to its log."""

    def signal(self, number: signal.Signals) -> None:
        """Send ``number`` to the kernel's process group, if there still is one."""
        group = getattr(self.provisioner, "pgid", None)
        if group:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, number)


class _AtomicHandler(LocalHandler):
    """Papermill's writer of local files, but one whose reader never sees half a notebook."""

    def write(self, buf: str, path: str) -> None:
        temporary = f"{path}.tmp"
        super().write(buf, temporary)
        os.replace(temporary, path)


class _StoppedError(Exception):
    """Raised between two cells once the parent has asked for a stop."""


class Progress:
    """Follows the cells of one run, tells the parent, and knows whether a cell failed. Its methods are nbclient's hooks."""

    def __init__(self, events: int, grace_s: float) -> None:
        self.events = events
        self.grace_s = grace_s
        self.titles: list[str | None] = []
        self.number = 0
        self.started = 0.0
        self.last_line = 0.0
        self.failed = False
        self.stopping = threading.Event()

    def tell(self, **event: Any) -> None:
        """One line to the parent, which may be gone."""
        with contextlib.suppress(BrokenPipeError):
            os.write(self.events, (json.dumps(event) + "\n").encode())

    def notebook_starts(self, notebook: Any) -> None:
        """Hook: the kernel is there and the passed parameters are in the notebook."""
        self.titles = cell_titles(notebook.cells)

    def cell_starts(self, cell: Any, cell_index: int) -> None:
        """Hook: a code cell is sent to the kernel."""
        if self.stopping.is_set():
            raise _StoppedError
        self.number += 1
        self.started = time.monotonic()
        of = len(self.titles) - self.titles.count(None)
        self.tell(event="cell", number=self.number, of=of, title=self.titles[cell_index])

    def cell_ends(self, cell: Any, cell_index: int, execute_reply: Any) -> None:
        """Hook: the kernel has replied to a code cell."""
        expected = "raises-exception" in cell.metadata.get("tags", [])
        self.failed = execute_reply["content"]["status"] == "error" and not expected
        merge_streams(cell)
        self.tell(event="cell_done", seconds=round(time.monotonic() - self.started, 3))

    def write(self, text: str) -> None:
        """What the running cell prints, as papermill's ``stdout_file``: the last line of it, at times."""
        now = time.monotonic()
        lines = text.rstrip().splitlines()
        if lines and now - self.started > QUIET_S and now - self.last_line > LINE_EVERY_S:
            self.last_line = now
            self.tell(event="text", line=lines[-1])

    def flush(self) -> None:
        """Nothing: every line is sent at once."""

    def stop(self) -> None:
        """Interrupt the kernel, and kill it if this process is still here after the grace."""
        if self.stopping.is_set():
            return
        self.stopping.set()
        if OwnKernel.current is not None:
            OwnKernel.current.signal(signal.SIGINT)
            time.sleep(self.grace_s)
            OwnKernel.current.signal(signal.SIGKILL)


def cell_titles(cells: Sequence[Mapping[str, Any]]) -> list[str | None]:
    """What to call each cell: a code cell's first line if that is a comment, else the heading before it.

    None for cells that are not run: text, and code cells without code.
    """
    titles: list[str | None] = []
    heading = ""
    for cell in cells:
        lines = [line.strip() for line in cell["source"].splitlines() if line.strip()]
        title = None
        if cell["cell_type"] == "markdown":
            headings = [line.lstrip("# ") for line in lines if re.match(r"#+ ", line)]
            heading = headings[-1] if headings else heading
        elif cell["cell_type"] == "code" and lines:
            comment = lines[0].lstrip("#% ") if lines[0].startswith("#") else ""
            title = comment or heading or lines[0]
        titles.append(title)
    return titles


def merge_streams(cell: Any) -> None:
    """Make one output of texts that came one after the other, which is how a front end shows them.

    nbclient's own way would also join texts with a figure between them.
    """
    merged: list[Any] = []
    for output in cell.outputs:
        before = merged[-1] if merged else None
        if before and output.output_type == before.output_type == "stream" and output.name == before.name:
            before.text += output.text
        else:
            merged.append(output)
    cell.outputs = merged


def execute(spec: dict[str, Any], events: int) -> None:
    """Run a notebook and tell the parent how it ended.

    ``spec``: ``notebook`` and ``output`` (paths), ``parameters`` (values), ``grace_s`` (from interrupt to kill).
    """
    papermill_io.register(str(Path(spec["output"]).parent), _AtomicHandler())
    progress = Progress(events, spec["grace_s"])
    signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=progress.stop, daemon=True).start())
    threading.Thread(target=_stop_at_eof, args=(progress,), daemon=True).start()
    outcome, error = "done", None
    with tempfile.TemporaryDirectory(prefix="moe-lab-") as OwnKernel.folder:
        try:
            papermill.execute_notebook(
                _no_template(spec["notebook"]), _no_template(spec["output"]), parameters=spec["parameters"],
                kernel_name="python3", language="python", progress_bar=False, start_timeout=START_TIMEOUT_S,
                kernel_manager_class=OwnKernel, on_notebook_start=progress.notebook_starts, on_cell_execute=progress.cell_starts, on_cell_executed=progress.cell_ends,
                raise_on_iopub_timeout=False, stdout_file=progress,
            )  # fmt: skip
        except PapermillExecutionError as failure:
            if progress.failed:
                outcome, error = "failed", _described(failure)
            else:  # papermill also counts errors in cells tagged raises-exception, which show one on purpose
                _remove_error_markers(spec["output"])
        except DeadKernelError:
            outcome = "kernel_died"
        except _StoppedError:
            outcome = "stopped"
        except Exception as failure:  # papermill or Jupyter itself: a full disk, a kernel that does not start
            outcome, error = "error", {"type": type(failure).__name__, "message": str(failure)}
    progress.tell(event="end", outcome=outcome, error=error)


def _described(failure: PapermillExecutionError) -> dict[str, Any]:
    """The error of a cell as plain text, without the colours of its traceback."""
    traceback = _ANSI.sub("", "\n".join(failure.traceback)).strip()
    return {"type": failure.ename, "message": _ANSI.sub("", failure.evalue), "traceback": traceback}


def _no_template(path: str) -> str:
    """Papermill fills ``{name}`` in paths; ours are meant as they are."""
    return path.replace("{", "{{").replace("}", "}}")


def _remove_error_markers(path: str) -> None:
    notebook = nbformat.read(path, as_version=4)
    notebook.cells = [c for c in notebook.cells if ERROR_MARKER_TAG not in c.metadata.get("tags", [])]
    papermill.iorw.write_ipynb(notebook, _no_template(path))


def _stop_at_eof(progress: Progress) -> None:
    """The parent's end of our standard input is its word to stop, and its last one if it is killed."""
    while os.read(0, 1024):
        pass
    progress.stop()


def main() -> None:
    """Entry point of the child process: ``SPEC`` is JSON, ``EVENT_FD`` the number of an inherited pipe."""
    execute(json.loads(sys.argv[1]), int(sys.argv[2]))


if __name__ == "__main__":
    main()
