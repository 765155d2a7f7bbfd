"""Whose fault it was: from what the ranks left behind to one error that names the right rank.

When one rank fails, the others fail too: those that were talking to it lose the connection, those that wait for it run
into the process group's time limit. Such errors *follow* from something else, and what they follow from is

1. the first rank that raised anything of its own, or died; or, where there is none,
2. the rank that is *silent*: it neither failed nor finished nor waits in a collective. Its stack and its last heartbeat
   say where it is. (gloo and NCCL can only blame the ranks that waited.)
"""

from __future__ import annotations

import importlib
import os
import re
import signal
import sysconfig
import time
import traceback
from pathlib import Path
from typing import Any

from moe_lab.errors import LaunchError, RankError, RankTimeout
from moe_lab.launch import beats, files

TAIL_LINES = 15
MESSAGE_LENGTH = 500  # characters of a rank's own message in the headline; the whole of it is in the log

_LIBRARIES = tuple({sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_HERE = os.path.dirname(__file__)
_LOST_A_PEER = re.compile(
    r"Connection (closed|reset|refused)|Broken pipe|likely closed|ncclRemoteError|remote process exited|communicator was aborted",
    re.I,
)
_WAITED_IN_VAIN = re.compile(
    r"timed out (waiting|after) \d+ ?ms|timeout after \d+ ?ms|collective operation timeout|Socket Timeout|failed to pass monitoredBarrier",
    re.I,
)
_ONLY_NETWORK = ("torch.distributed.DistNetworkError", "torch.distributed.DistStoreError")
_FROM_TRANSPORT = re.compile(r"gloo|NCCL|c10d|monitoredBarrier", re.I)


def describe(error: BaseException) -> dict[str, Any]:
    """An exception as JSON: ``type``, ``message``, ``where`` ("file.py:12", the innermost line of the user's), ``traceback``."""
    kind = type(error)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    whole = traceback.TracebackException.from_exception(error)
    # The frames of the launcher and of the import machinery explain nothing to the reader.
    frames = [frame for frame in whole.stack if not _is_launchers(frame.filename)]
    whole.stack = traceback.StackSummary.from_list(frames)
    where: str | None
    if isinstance(error, SyntaxError) and error.filename:
        where = f"{os.path.basename(error.filename)}:{error.lineno}"
    else:
        users = [frame for frame in frames if _is_users(frame.filename)]
        where = f"{os.path.basename(users[-1].filename)}:{users[-1].lineno}" if users else None
    return {"type": name, "message": str(error), "where": where, "traceback": "".join(whole.format())}


def _is_launchers(path: str) -> bool:
    """Whether a source file belongs to the launcher or to Python's import machinery."""
    return os.path.dirname(path) == _HERE or path.startswith("<frozen") or path == importlib.__file__


def _is_users(path: str) -> bool:
    """Whether a source file belongs to the user or to moe_lab's stack, and not to Python, a library or the launcher."""
    if path.startswith("<") or _is_launchers(path):
        return False
    return f"{os.sep}moe_lab{os.sep}" in path or not path.startswith(_LIBRARIES)


def follows(report: dict[str, Any] | None, exit_code: int | None) -> bool:
    """Whether a failed rank's failure looks like the consequence of another rank's: a lost peer or a wait in vain."""
    if report is None:  # NCCL's watchdog ends its own process when a collective takes too long
        return exit_code == -signal.SIGABRT
    error = report.get("error") or {}
    if error.get("type") in _ONLY_NETWORK:
        return True
    return _from_transport(report) and any(
        pattern.search(error["message"]) for pattern in (_LOST_A_PEER, _WAITED_IN_VAIN)
    )


def _from_transport(report: dict[str, Any]) -> bool:
    """Whether a rank's error came out of gloo, NCCL or the store, whatever it says."""
    error = report.get("error") or {}
    typed = error.get("type", "").startswith("torch.distributed.")
    return typed or bool(_FROM_TRANSPORT.search(error.get("message", "")))


def failure(call: dict[str, Any], answer: dict[str, Any]) -> LaunchError:
    """The error to raise for a call that ended "failed" or "deadline"; also appends each traceback to its rank's log."""
    folder, size = Path(call["run_dir"]), int(call["ranks"])
    reports = {rank: report for rank in range(size) if (report := files.read_report(folder, rank))}
    exits = {int(rank): code for rank, code in answer["exits"].items()}
    for rank, report in reports.items():
        if not report["ok"]:
            with open(files.rank_file(folder, rank, "log"), "a", encoding="utf-8") as log:
                log.write(report["error"]["traceback"])
    raised = sorted((report["time"], rank) for rank, report in reports.items() if not report["ok"])
    failed = [rank for _, rank in raised]
    died = [rank for rank in exits if rank not in reports]
    causes = [rank for rank in failed if not follows(reports[rank], None)]
    dead_causes = [rank for rank in died if not follows(None, exits[rank])]
    # A death carries no time of its own, but transports have many words for a peer that died.
    if causes and not (dead_causes and all(_from_transport(reports[rank]) for rank in causes)):
        return _raised(call, folder, causes, reports)
    if dead_causes:
        return _died(call, folder, dead_causes[0], exits[dead_causes[0]])
    silent = [rank for rank in range(size) if rank not in reports and rank not in exits]
    if silent:
        return _hung(call, folder, answer["ended"], silent, failed + died)
    if failed and len(failed) < len(reports):
        return _left(call, folder, failed, reports)
    if any(_WAITED_IN_VAIN.search(reports[rank]["error"]["message"]) for rank in failed):
        return _disagreed(call, folder, sorted(failed), reports)
    return _raised(call, folder, failed, reports) if failed else _died(call, folder, died[0], exits[died[0]])


def _raised(
    call: dict[str, Any], folder: Path, ranks: list[int], reports: dict[int, dict[str, Any]]
) -> RankError:
    """One or more ranks raised an exception; ``ranks`` in the order of time."""
    first, others = ranks[0], ranks[1:]
    error, size = reports[first]["error"], call["ranks"]
    where = f" ({error['where']})" if error["where"] else ""
    message = f": {error['message'][:MESSAGE_LENGTH]}" if error["message"] else ""
    doing = {
        "import": f"could not import {call['target']}: ",
        "join": "could not join the process group: ",
    }.get(reports[first]["phase"], "")
    same = sorted(rank for rank in others if reports[rank]["error"]["type"] == error["type"])
    also = f"; {_names(same)} raised {error['type']} too" if same else ""
    log = files.rank_file(folder, first, "log")
    text = f"rank {first} of {size}: {doing}{error['type']}{message}{where}{also}\n{_tail(log)}"
    return RankError(text.rstrip(), rank=first, exit_code=1, log=str(log))


def _died(call: dict[str, Any], folder: Path, rank: int, code: int) -> RankError:
    """A rank ended without a report."""
    beat = beats.read(files.rank_file(folder, rank, "beat"))
    at = f", last at {beat.label!r}" if beat else ""
    if code < 0:
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = "an unknown signal"
        hint = "; the system does that when memory runs out" if -code == signal.SIGKILL else ""
        what = f"was killed by signal {-code} ({name}){at}{hint}"
    else:
        what = f"ended with exit status {code} before it returned a result{at}"
    log = files.rank_file(folder, rank, "log")
    text = f"rank {rank} of {call['ranks']} {what}\n{_tail(log)}"
    return RankError(text.rstrip(), rank=rank, exit_code=code, log=str(log))


def _hung(
    call: dict[str, Any], folder: Path, ended: str, unfinished: list[int], victims: list[int]
) -> RankTimeout:
    """Nobody failed on its own account, but some ranks did not come to an end."""
    now, size = time.time(), call["ranks"]
    places = {rank: _place(files.rank_file(folder, rank, "stack")) for rank in unfinished}
    waiting = [rank for rank in unfinished if places[rank][1]]
    suspects = [rank for rank in unfinished if rank not in waiting] or unfinished
    last = {rank: beats.read(files.rank_file(folder, rank, "beat")) for rank in suspects}
    ages = {rank: now - beat.time if beat else now - call["started"] for rank, beat in last.items()}
    oldest = max(ages.values(), default=0.0)
    silent = [rank for rank in suspects if ages[rank] > oldest - 1]
    waiters = sorted(set(victims) | (set(waiting) - set(silent)))

    def account(rank: int) -> str:
        beat = last[rank]
        return (
            f"for {ages[rank]:.1f} s, last at {beat.label if beat else 'its start'!r}, now {places[rank][0]}"
        )

    if len(silent) == size:
        body = f"all {size} ranks were still at work when the call's {call['timeout_s']:g} s were over (rank {silent[0]} {account(silent[0])}); "
        body += "allow more with timeout_s, or look for a hang there"
    else:
        body = f"{_names(silent)} of {size} {'was' if len(silent) == 1 else 'were'} silent "
        body += (
            account(silent[0])
            if len(silent) == 1
            else "; ".join(f"(rank {rank} {account(rank)})" for rank in silent)
        )
        if waiters:
            limit = f" for {call['group_timeout_s']:g} s" if ended == "failed" else ""
            body += f"; {_names(waiters)} waited{limit} in a collective"
        if ended == "deadline":
            body += f"; the call's {call['timeout_s']:g} s are over"
    text = f"{body}; stacks and logs are in {folder}\n{_tail(files.rank_file(folder, silent[0], 'log'))}"
    return RankTimeout(text.rstrip(), silent=silent)


def _left(
    call: dict[str, Any], folder: Path, failed: list[int], reports: dict[int, dict[str, Any]]
) -> RankTimeout:
    """Ranks needed others that had already returned."""
    finished = [rank for rank, report in reports.items() if report["ok"]]
    waited = any(_WAITED_IN_VAIN.search(reports[rank]["error"]["message"]) for rank in failed)
    limit = f"waited {call['group_timeout_s']:g} s" if waited else "lost the connection"
    text = (
        f"{_names(sorted(failed))} of {call['ranks']} {limit} in a collective that {_names(finished)}, which had already returned, "
        f"never joined or joined with another shape; stacks and logs are in {folder}\n{_tail(files.rank_file(folder, failed[0], 'log'))}"
    )
    return RankTimeout(text, silent=finished)


def _disagreed(
    call: dict[str, Any], folder: Path, failed: list[int], reports: dict[int, dict[str, Any]]
) -> RankTimeout:
    """Every rank waited, each for another: the collectives that they called do not match."""
    places = "; ".join(f"rank {rank} at {reports[rank]['error']['where']}" for rank in failed)
    text = f"{_names(failed)} of {call['ranks']} waited {call['group_timeout_s']:g} s in collectives that do not match ({places})"
    return RankTimeout(f"{text}; stacks and logs are in {folder}", silent=failed)


def _names(ranks: list[int]) -> str:
    """``rank 2``, or ``ranks 0, 1, 3``."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _place(stack: Path) -> tuple[str, bool]:
    """Where the main thread of a rank stood, in words, and whether that was inside ``torch.distributed``."""
    try:
        text = stack.read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    # One block a thread, innermost frame first; the main thread is the one that runs the launcher's worker.
    block = next((part for part in text.split("\n\n") if "in rank_main" in part), "")
    frames = re.findall(r'File "(.+)", line (\d+) in (.+)', block)
    if not frames:
        return "no stack could be had", False
    users = next((place for place, frame in enumerate(frames) if _is_users(frame[0])), None)
    path, line, function = frames[users or 0]
    inside = any(f"torch{os.sep}distributed" in frame[0] for frame in frames[: users or 0])
    calling = f" calling {frames[0][2]}" if users else ""
    return f"in {function} ({os.path.basename(path)}:{line}){calling}", inside


def _tail(log: Path) -> str:
    """The last lines of a log under a heading; nothing if it is empty. C++ stack frames are left out."""
    try:
        with open(log, "rb") as file:
            file.seek(max(0, os.path.getsize(log) - 20_000))
            lines = file.read().decode("utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    lines = [
        line[:300]
        for line in lines
        if line.strip() and not re.match(r"frame #\d+|<omitting python frames>", line)
    ]
    return (
        "\n".join([f"last lines of {log}:", *(f"  {line}" for line in lines[-TAIL_LINES:])]) if lines else ""
    )
