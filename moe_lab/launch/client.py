"""The kernel's side of the agent: start it when it is first needed, send a call, wait, interrupt, stop."""

from __future__ import annotations

import atexit
import codecs
import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from moe_lab.errors import LaunchError

START_LIMIT = 180.0  # seconds for the agent to import torch, on a cold and slow disk
GRACE = 20.0  # seconds past the call's own deadline after which the agent itself is taken for stuck
TICK = 0.05


class Agent:
    """One running agent process. It belongs to the process that started it; a forked copy of that must not use it."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  (closed with the agent)
        self._pending = b""
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        environment = {
            **os.environ, "PYTHONPATH": path,
            # A thread pool made at import would not survive the fork; ranks get their threads from torch.
            "OPENBLAS_NUM_THREADS": "1",
            # Otherwise torch.cuda.is_available() initialises the driver, which forked ranks could not use any more.
            "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
        }  # fmt: skip
        self._process = subprocess.Popen(
            [sys.executable, "-m", "moe_lab.launch.agent", str(os.getpid())], env=environment, start_new_session=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors,
        )  # fmt: skip
        try:
            self.pid = int(self._receive(time.monotonic() + START_LIMIT, lambda: None)["ready"])
        except BaseException:
            self.close(wait=0)
            raise

    def usable(self) -> bool:
        """Whether this process may send the agent another call."""
        return self.owner == os.getpid() and self._process.poll() is None

    def call(self, request: dict[str, Any], on_tick: Callable[[], None]) -> dict[str, Any]:
        """Send one call and return the agent's answer, calling ``on_tick`` about 20 times a second meanwhile.

        An exception in between (Jupyter's interrupt is a KeyboardInterrupt) stops the ranks before it goes on. Raises
        :class:`LaunchError` if the agent goes away.
        """
        try:
            self._send(request)
            return self._receive(time.monotonic() + request["timeout_s"] + GRACE, on_tick, request["id"])
        except LaunchError:
            self.close(wait=0)
            raise
        except BaseException:
            self._cancel(request["id"])
            raise

    def _cancel(self, call: str) -> None:
        try:
            self._send({"cancel": call})
            self._receive(time.monotonic() + 5, lambda: None, call)
        except BaseException:  # a second interrupt, too: whatever happens, the ranks must go
            self.close(wait=0)

    def _send(self, message: dict[str, Any]) -> None:
        assert self._process.stdin
        try:
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            raise self._gone() from None

    def _receive(self, limit: float, on_tick: Callable[[], None], call: str | None = None) -> dict[str, Any]:
        """The next answer (to ``call``, if one is given; answers to calls that were cancelled are dropped)."""
        assert self._process.stdout
        output = self._process.stdout.fileno()
        while True:
            while b"\n" not in self._pending:
                if time.monotonic() > limit:
                    raise LaunchError(
                        "the launch agent did not answer in time and was stopped; the next call starts a new one"
                    )
                if select.select([output], [], [], TICK)[0]:
                    chunk = os.read(output, 1 << 16)
                    if not chunk:
                        raise self._gone()
                    self._pending += chunk
                on_tick()
            line, self._pending = self._pending.split(b"\n", 1)
            message: dict[str, Any] = json.loads(line)
            if call is None or message.get("id") == call:
                return message

    def _gone(self) -> LaunchError:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(2)
        self._errors.seek(0)
        said = self._errors.read().decode(errors="replace").strip()[-2000:]
        why = f"; it said:\n{said}" if said else ""
        return LaunchError(
            f"the launch agent ended (status {self._process.poll()}) and its ranks with it; the next call starts a new one{why}"
        )

    def close(self, wait: float = 5) -> None:
        """End the agent. It gets ``wait`` seconds to stop by itself; its ranks cannot outlive it."""
        if self.owner == os.getpid():
            assert self._process.stdin
            assert self._process.stdout
            with contextlib.suppress(OSError):
                self._process.stdin.close()
            try:
                self._process.wait(wait)
            except subprocess.TimeoutExpired:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()
            self._process.stdout.close()
        self._errors.close()


class Tail:
    """Follows a growing log and prints its whole lines to the caller's standard output, a cell's output in Jupyter."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._position = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held = ""

    def __call__(self, last: bool = False) -> None:
        """Print what is new. ``last``: also a final line without its end."""
        try:
            with open(self._path, "rb") as file:
                file.seek(self._position)
                data = file.read()
        except FileNotFoundError:
            return
        self._position += len(data)
        text = self._held + self._decoder.decode(data, final=last)
        whole, end, self._held = text.rpartition("\n")
        if last and self._held:
            whole, end, self._held = text, "\n", ""
        if whole or end:
            print(whole, flush=True)


_lock = threading.Lock()
_agent: Agent | None = None


@contextlib.contextmanager
def warm_agent() -> Iterator[Agent]:
    """The agent of this process, started if there is none. One call at a time; a second thread waits for its turn."""
    global _agent
    with _lock:
        if _agent is None or not _agent.usable():
            if _agent is not None:
                _agent.close(wait=0)
            _agent = None
            _agent = Agent()
        yield _agent


def shutdown() -> None:
    """Stop the agent and free its memory (about 300 MB). The next :func:`~moe_lab.launch.run.run` starts a new one."""
    global _agent
    with _lock:
        if _agent is not None:
            _agent.close()
            _agent = None


atexit.register(shutdown)
