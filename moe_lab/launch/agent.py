"""The warm process that starts ranks: ``python -m moe_lab.launch.agent KERNEL_PID``.

It imports torch once and then forks the ranks of each call, which is 30 times faster than starting Python anew and
reports the death of a rank at once, because the ranks are its own children. It stays single-threaded and never touches
CUDA, so that forking is safe, and it imports no code of the user, so that every call sees the files as they are now.

One request a line on standard input, one answer a line on standard output, both JSON::

    {"id", "target", "arguments", "ranks", "timeout_s", ...}   ->   {"id", "ended", "exits"}
    {"cancel": id}                                             ->   the same answer, with ``ended`` "cancelled"

``ended`` is "done", "failed" (a rank raised or died), "deadline", "cancelled" or "refused" (ranks could not be
started); ``exits`` holds the exit codes of ranks that ended before they were stopped. All else is in the rank files.

Nothing outlives the kernel: the agent ends when its standard input does or its parent changes, and takes the ranks with
it; the ranks get SIGKILL from the operating system should the agent itself be killed.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

from moe_lab.launch import diagnose, files
from moe_lab.launch.parent import adopt_orphans, die_with_parent

TICK = 0.01  # seconds between two looks at the ranks
SETTLE = 0.1  # after a rank failed: time for others that failed by themselves to say so
PATIENCE = (
    2.0  # after a rank lost its peers or waited in vain: time for the rank that is the reason to show itself
)
PRELOAD = ("torch", "torch.distributed", "torch.distributed.tensor", "torch.distributed.pipelining")


class KernelGone(Exception):
    """The process that started the agent has ended."""


class Kernel:
    """The line to the process that started the agent."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.reads = os.dup(0)
        self.writes = os.dup(1)
        os.dup2(2, 1)  # whatever prints during an import must not end up between two answers
        self._pending = b""

    def receive(self, wait: float) -> dict[str, Any] | None:
        """The next message, or None if none came within ``wait`` seconds. Raises :class:`KernelGone`."""
        if b"\n" not in self._pending and select.select([self.reads], [], [], wait)[0]:
            chunk = os.read(self.reads, 1 << 20)
            if not chunk:
                raise KernelGone
            self._pending += chunk
        if (
            os.getppid() != self.pid
        ):  # end of input is not enough: a child of the kernel may hold the pipe open
            raise KernelGone
        if b"\n" not in self._pending:
            return None
        line, self._pending = self._pending.split(b"\n", 1)
        message: dict[str, Any] = json.loads(line)
        return message

    def send(self, message: dict[str, Any]) -> None:
        """Answer. Raises :class:`KernelGone` if nobody is there to read it."""
        data = json.dumps(message).encode() + b"\n"
        try:
            while data:
                data = data[os.write(self.writes, data) :]
        except BrokenPipeError:
            raise KernelGone from None


class Ranks:
    """The processes of one call. ``alive``: process ids by rank; ``exits``: exit codes; ``reports``: by rank."""

    def __init__(self, call: dict[str, Any], kernel: Kernel) -> None:
        self.size: int = call["ranks"]
        self.folder = Path(call["run_dir"])
        self.alive: dict[int, int] = {}
        self.exits: dict[int, int] = {}
        self.reports: dict[int, dict[str, Any]] = {}
        released, self._release = os.pipe()
        # Bound here and handed down open: between choosing a free port and using it, nobody else can take it.
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            listener.listen(max(128, 4 * self.size))
            call["port"] = listener.getsockname()[1]
            try:
                for rank in range(self.size):
                    self.alive[rank] = self._fork(call, rank, kernel, listener.fileno(), released)
            except OSError:
                self.stop()
                raise
            finally:
                os.close(released)

    def _fork(self, call: dict[str, Any], rank: int, kernel: Kernel, listener: int, released: int) -> int:
        agent = os.getpid()
        pid = os.fork()
        if pid:
            return pid
        status = 1
        try:
            for descriptor in (self._release, kernel.reads, kernel.writes):
                os.close(descriptor)
            from moe_lab.launch.worker import rank_main

            status = rank_main(call, rank, agent, listener, released)
        finally:
            os._exit(status)  # never back into the agent's own code

    def look(self) -> None:
        """Take note of ranks that have reported or ended since the last look."""
        for rank, pid in list(self.alive.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                del self.alive[rank]
                self.exits[rank] = os.waitstatus_to_exitcode(status)
                self._sweep([pid])
        for rank in range(self.size):
            if rank not in self.reports and (report := files.read_report(self.folder, rank)):
                self.reports[rank] = report

    def finished(self) -> bool:
        """Whether every rank has returned a result."""
        return sum(report["ok"] for report in self.reports.values()) == self.size

    def failed(self) -> list[int]:
        """Ranks that reported an error, or ended without a report."""
        raised = [rank for rank, report in self.reports.items() if not report["ok"]]
        return raised + [rank for rank in self.exits if rank not in self.reports]

    def settle(self) -> None:
        """After the first failure: wait until the rank that is the reason for it is known, or stays silent."""
        start = time.monotonic()
        while True:
            causes = [
                rank
                for rank in self.failed()
                if not diagnose.follows(self.reports.get(rank), self.exits.get(rank))
            ]
            silent = [rank for rank in self.alive if rank not in self.reports]
            if not silent or time.monotonic() - start > (SETTLE if causes else PATIENCE):
                break
            time.sleep(TICK)
            self.look()
        if silent and not causes:
            self.dump_stacks()

    def dump_stacks(self) -> None:
        """Have every rank that has not reported write its Python stack to ``rank<k>.stack``; waits half a second at most."""
        asked = [rank for rank in self.alive if rank not in self.reports]
        for rank in asked:
            os.kill(self.alive[rank], signal.SIGUSR1)
        limit = time.monotonic() + 0.5
        while time.monotonic() < limit and not all(
            files.rank_file(self.folder, r, "stack").stat().st_size for r in asked
        ):
            time.sleep(TICK)
        time.sleep(2 * TICK)  # the last of them may still be writing

    def release(self) -> None:
        """Let ranks that have all finished go; one that does not go within five seconds is stopped."""
        os.close(self._release)
        self._release = -1
        limit = time.monotonic() + 5
        while self.alive and time.monotonic() < limit:
            time.sleep(TICK / 2)
            self.look()

    def stop(self) -> None:
        """Kill what is left of the ranks and of the processes that they started."""
        for pid in self.alive.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in self.alive.values():
            os.waitpid(pid, 0)
        self._sweep(list(self.alive.values()))
        self.alive.clear()
        if self._release >= 0:
            os.close(self._release)
            self._release = -1

    @staticmethod
    def _sweep(sessions: list[int]) -> None:
        """Kill descendants of ended ranks. Helpers that clean up after their parent's death get a moment to do so."""
        limit = time.monotonic() + 0.2
        for session in sessions:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                while time.monotonic() < limit:
                    with contextlib.suppress(ChildProcessError):
                        os.waitpid(-session, os.WNOHANG)
                    os.killpg(session, 0)
                    time.sleep(TICK / 2)
                os.killpg(session, signal.SIGKILL)
                with contextlib.suppress(ChildProcessError):
                    while True:
                        os.waitpid(-session, 0)


def serve(call: dict[str, Any], kernel: Kernel) -> dict[str, Any]:
    """Run one call to its end, leaving no process behind, and return the answer."""
    deadline = time.monotonic() + call["timeout_s"]
    try:
        ranks = Ranks(call, kernel)
    except OSError as error:
        return {"id": call["id"], "ended": "refused", "exits": {}, "reason": str(error)}
    ended = "cancelled"
    try:
        while True:
            message = kernel.receive(TICK)
            if message and message.get("cancel") == call["id"]:
                break
            ranks.look()
            if ranks.failed():
                ranks.settle()
                ended = "failed"
                break
            if ranks.finished():
                ranks.release()
                ended = "done"
                break
            if time.monotonic() > deadline:
                ranks.dump_stacks()
                ended = "deadline"
                break
    finally:
        exits = dict(ranks.exits)
        ranks.stop()
    return {"id": call["id"], "ended": ended, "exits": exits}


def main() -> None:
    """Serve calls until the kernel is gone."""
    kernel = Kernel(int(sys.argv[1]))
    # While the imports below run nobody looks whether the kernel is still there, so the operating system must. Later it
    # must not: to Linux the "parent" is the thread that started the agent, and that may end long before the kernel.
    die_with_parent(signal.SIGKILL)
    adopt_orphans()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for module in (*PRELOAD, "moe_lab.launch.worker"):
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # what is here now is shared with the ranks; a collection in a rank must not copy its pages
    die_with_parent(0)
    with contextlib.suppress(KernelGone):
        kernel.send({"ready": os.getpid()})
        while True:
            message = kernel.receive(0.5)
            if message and "target" in message:
                kernel.send(serve(message, kernel))


if __name__ == "__main__":
    main()
