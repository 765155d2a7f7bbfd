"""What happens inside one rank, and the process-group set-up that ranks share with torchrun.

:func:`rank_main` runs in a process that the agent has just forked: it makes that process look as if it had been
started on its own (environment, working directory, output, random state), joins the process group, calls the function
and writes a report. :func:`init_process_group` and :func:`device` serve the same training code when torchrun, or
nobody, started it.
"""

from __future__ import annotations

import faulthandler
import io
import os
import random
import signal
import sys
import time
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import HashStore, Store, TCPStore, distributed_c10d  # type: ignore[attr-defined]

from moe_lab.errors import ConfigError
from moe_lab.launch import beats, files, target
from moe_lab.launch.diagnose import describe
from moe_lab.launch.parent import die_with_parent

LAUNCHER_VARIABLES = (
    "RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE",
    "ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT",
)  # fmt: skip


def resolve_backend(backend: str, local_ranks: int) -> str:
    """The process-group backend for ``backend="auto"``; any other name is returned as it is.

    NCCL needs a device of its own for each rank, so ranks that outnumber the devices talk through gloo.
    """
    if backend != "auto":
        return backend
    own_device = (
        torch.cuda.is_available() and local_ranks <= torch.cuda.device_count() and dist.is_nccl_available()
    )
    return "cpu:gloo,cuda:nccl" if own_device else "gloo"


def device() -> torch.device:
    """This rank's device, ``cuda:LOCAL_RANK`` or the CPU; a CUDA device becomes the current one.

    Ranks that outnumber the devices share them in turn. The first call initialises CUDA, so a rank that only talks
    through gloo and never asks for its device does not pay for that.
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    own = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    torch.cuda.set_device(own)
    return own


def init_process_group(timeout_s: float = 600, backend: str = "auto") -> bool:
    """Join the process group of whoever started this process.

    Under :func:`moe_lab.launch.run` the group is there already; under torchrun it is made from the environment; a
    process that no launcher started becomes a world of one. Returns True if this call made the group (its maker should
    destroy it). ``timeout_s`` bounds each collective. Raises :class:`ConfigError` if only one of ``RANK`` and
    ``WORLD_SIZE`` is set.
    """
    if dist.is_initialized():
        return False
    given = [name for name in ("RANK", "WORLD_SIZE") if name in os.environ]
    if len(given) == 1:
        raise ConfigError(
            f"only {given[0]} of RANK and WORLD_SIZE is set: start with torchrun, which sets both, or unset it"
        )
    if given:
        _join(None, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), timeout_s, backend)
    else:
        _join(HashStore(), 0, 1, timeout_s, backend)
    return True


def _join(store: Store | None, rank: int, world: int, timeout_s: float, backend: str) -> None:
    """``torch.distributed.init_process_group``; without a store it meets the others at ``MASTER_ADDR:MASTER_PORT``."""
    backend = resolve_backend(backend, int(os.environ.get("LOCAL_WORLD_SIZE", str(world))))
    # With its device given, NCCL connects here, where a failure has a clear place, and not in the first collective.
    bound = device() if "nccl" in backend else None
    # Subgroups, which meshes make, do not inherit this limit but take these defaults: half an hour, or ten minutes.
    limit = timedelta(seconds=timeout_s)
    distributed_c10d.default_pg_timeout = limit
    distributed_c10d.default_pg_nccl_timeout = limit  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=limit, device_id=bound)


def rank_main(call: dict[str, Any], rank: int, agent: int, listener: int, release: int) -> int:
    """One rank from fork to exit; returns its exit status.

    ``call``: the request as :func:`moe_lab.launch.run.run` made it. ``agent``: process id of the parent.
    ``listener``: a listening socket (file descriptor) on which rank 0 serves the store. ``release``: a pipe that ends
    when every rank has finished; until then rank 0 must stay, because it holds the store.
    """
    # A session of its own lets the agent kill a rank together with whatever the rank started (data loaders, compilers).
    os.setsid()
    die_with_parent(signal.SIGKILL)
    if os.getppid() != agent:  # it died before the line above took effect
        return 1
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    folder = call["run_dir"]
    _redirect_output(files.rank_file(folder, rank, "log"))
    stack = open(files.rank_file(folder, rank, "stack"), "w")  # noqa: SIM115  (open for as long as the process lives)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)
    beats.start(files.rank_file(folder, rank, "beat"))
    phase = "start"
    try:
        beats.heartbeat("starting")
        _adopt_environment(call, rank)
        phase = "import"
        beats.heartbeat(f"importing {call['target']}")
        fn = target.resolve(call["target"])
        phase = "join"
        beats.heartbeat("joining the process group")
        _join(_store(call, rank, listener), rank, call["ranks"], call["group_timeout_s"], call["backend"])
        phase = "run"
        beats.heartbeat(f"running {call['target']}")
        result = fn(**call["arguments"])
        result = {} if result is None else result
        if not isinstance(result, dict):
            raise TypeError(
                f"{call['target']} returned a {type(result).__name__}, but ranks return a dict of JSON values or None"
            )
        if problem := files.not_json(result, "result"):
            raise TypeError(f"{call['target']} returned what is not JSON: {problem}")
        report = {"rank": rank, "ok": True, "result": result}
    except BaseException as error:  # SystemExit and KeyboardInterrupt end a rank like any other error
        report = {"rank": rank, "ok": False, "phase": phase, "error": describe(error)}
    beats.heartbeat("finished" if report["ok"] else "failed")
    sys.stdout.flush()
    sys.stderr.flush()
    files.write_report(folder, rank, {**report, "time": time.time()})
    if not report["ok"]:
        return 1
    os.read(release, 1)
    if dist.is_initialized():
        dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    return 0


def _redirect_output(path: os.PathLike[str]) -> None:
    """Send file descriptors 1 and 2, and Python's own streams, to the log; read nothing from standard input."""
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    null = os.open(os.devnull, os.O_RDONLY)
    for source, goal in ((null, 0), (log, 1), (log, 2)):
        os.dup2(source, goal)
    os.close(log)
    os.close(null)
    # Unbuffered below the text layer and flushed at each line, so that a killed rank loses no line it printed.
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        raw = open(descriptor, "wb", closefd=False)  # noqa: SIM115
        setattr(
            sys, name, io.TextIOWrapper(raw, encoding="utf-8", errors="backslashreplace", line_buffering=True)
        )


def _adopt_environment(call: dict[str, Any], rank: int) -> None:
    """Take over the caller's environment variables, directory and import path, and add what launchers set."""
    # A launcher's variables around the caller (a notebook inside a torchrun or Slurm job) are not about this run.
    inherited = {
        k: v
        for k, v in call["environment"].items()
        if k not in LAUNCHER_VARIABLES and not k.startswith("TORCHELASTIC_")
    }
    ranks, threads = str(call["ranks"]), str(call["threads"])
    os.environ.clear()
    os.environ.update(inherited)
    os.environ.update({
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks,
        "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(call["port"]),
        "OMP_NUM_THREADS": threads,
    })  # fmt: skip
    # All ranks are on this machine. By default gloo looks up the host's own name, which fails on a laptop off line.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    os.environ.update(call["extra_environment"])
    os.chdir(call["directory"])
    sys.path[:] = call["path"]
    torch.set_num_threads(call["threads"])
    # The forked copies of the agent's generators would give every rank of every call the same "random" numbers.
    random.seed()
    np.random.seed()


def _store(call: dict[str, Any], rank: int, listener: int) -> Store:
    """The key-value store of this run. Rank 0 serves it on the socket that the agent bound, so no port can be lost to another run."""
    return TCPStore(
        "127.0.0.1",
        call["port"],
        call["ranks"],
        is_master=rank == 0,
        timeout=timedelta(seconds=call["group_timeout_s"]),
        wait_for_workers=False,
        master_listen_fd=listener if rank == 0 else None,
    )
