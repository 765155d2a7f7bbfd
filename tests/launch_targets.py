"""Functions that the launcher's tests run on ranks. Ranks import this module by its name, as they would a user's."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from moe_lab.launch import heartbeat
from moe_lab.launch.worker import device, init_process_group


def total(scale: float = 1.0) -> dict[str, Any]:
    """The sum of all ranks' numbers, and what this rank knows of itself."""
    value = torch.tensor([scale * dist.get_rank()])
    dist.all_reduce(value)
    return {"sum": value.item(), "rank": dist.get_rank(), "world": dist.get_world_size()}


def echo(**kwargs: Any) -> dict[str, Any]:
    return kwargs


def nothing() -> None:
    pass


def about() -> dict[str, Any]:
    """What a rank sees of its surroundings."""
    cuda = torch.cuda.is_initialized()
    names = (
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "GROUP_RANK",
        "MASTER_ADDR",
        "MASTER_PORT",
    )
    return {
        "launcher": {name: os.environ.get(name) for name in names}, "elastic": [n for n in os.environ if "ELASTIC" in n],
        "marker": os.environ.get("MOE_LAB_TEST_MARKER"), "directory": os.getcwd(), "threads": torch.get_num_threads(),
        "pid": os.getpid(), "parent": os.getppid(), "random": random.random(), "numpy": float(np.random.rand()),
        "torch_seed": torch.initial_seed(), "backend": dist.get_backend(), "device": str(device()),
        "made_group": init_process_group(), "cuda": cuda, "stdin": sys.stdin.read(),
    }  # fmt: skip


def on_device() -> dict[str, Any]:
    """Collectives on this rank's device and on the CPU."""
    here, cpu = torch.ones(4, device=device()), torch.ones(4)
    for value in (here, cpu):
        dist.all_reduce(value)
    return {"device": str(here.device), "sums": [here.sum().item(), cpu.sum().item()], "backend": dist.get_backend(),
            "current": torch.cuda.current_device()}  # fmt: skip


def sleeps_on_device(rank: int) -> None:
    """As :func:`sleeps`, through NCCL, where waiting happens on the GPU and not inside ``torch.distributed``."""
    value = torch.ones(4, device=device())
    dist.all_reduce(value)
    heartbeat("in step")
    if dist.get_rank() == rank:
        time.sleep(600)
    dist.all_reduce(value)
    value.sum().item()


def talk(lines: int = 3, pause_s: float = 0.0) -> None:
    for line in range(lines):
        print(f"rank {dist.get_rank()} says {line} äöü", flush=True)
        time.sleep(pause_s)
    print("and ends without a newline", end="")


def boom(rank: int = 2) -> None:
    """One rank raises while the others wait for it."""
    print("before the failure")
    if dist.get_rank() == rank:
        raise ValueError("boom")
    dist.all_reduce(torch.ones(4))


def all_boom() -> None:
    raise ValueError("boom everywhere")


def killed(rank: int = 2, number: int = signal.SIGKILL) -> None:
    """One rank dies while the others are inside a collective."""
    heartbeat("about to reduce")
    if dist.get_rank() == rank:
        time.sleep(0.3)
        os.kill(os.getpid(), number)
    dist.all_reduce(torch.ones(4))


def leaves(rank: int = 1, status: int = 3) -> None:
    if dist.get_rank() == rank:
        print("leaving")
        sys.stdout.flush()
        os._exit(status)
    dist.all_reduce(torch.ones(4))


def calls_exit(status: int = 0) -> None:
    sys.exit(status)


def segfaults() -> None:
    import ctypes

    ctypes.string_at(0)


def sleeps(rank: int, seconds: float = 600) -> None:
    """One rank never comes to the collective that the others wait in."""
    for step in range(3):
        heartbeat(f"step {step}")
        dist.all_reduce(torch.ones(4))
    if dist.get_rank() == rank:
        time.sleep(seconds)
    dist.all_reduce(torch.ones(4))


def sleeps_beside_subgroup(seconds: float = 600) -> None:
    """Rank 1 hangs, and rank 0 waits for it in a group of those two. Ranks 2 and 3 finish."""
    pair = dist.new_group([0, 1])
    if dist.get_rank() == 1:
        time.sleep(seconds)
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(4), group=pair)


def sleeps_at_the_end(rank: int, seconds: float = 600) -> None:
    """One rank hangs outside any collective; all others have finished."""
    dist.all_reduce(torch.ones(4))
    heartbeat("the last step")
    if dist.get_rank() == rank:
        time.sleep(seconds)


def spins_in_c(rank: int) -> None:
    """A rank that is stuck inside a call that never returns to the interpreter."""
    if dist.get_rank() == rank:
        pattern = "(a+)+$"
        import re

        re.match(pattern, "a" * 60 + "b")
    dist.barrier()


def works_on(seconds: float) -> None:
    """All ranks are alive and reporting, only slow."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        heartbeat("grinding")
        time.sleep(0.02)


def returns_early(rank: int) -> None:
    """One rank returns while the others wait in a collective for it."""
    if dist.get_rank() != rank:
        dist.all_reduce(torch.ones(4))


def different_collectives() -> None:
    """Nobody is silent, but the ranks do not agree on what comes next."""
    if dist.get_rank() == 0:
        dist.recv(torch.ones(4), src=1)
    else:
        dist.recv(torch.ones(4), src=0)


def own_timeout() -> None:
    """An error that only sounds like a transport's."""
    if dist.get_rank() == 1:
        raise RuntimeError("Timed out waiting 30ms for the reader")
    dist.all_reduce(torch.ones(4))


def returns_tensor() -> dict[str, Any]:
    return {"loss": torch.ones(2)}


def returns_list() -> Any:
    return [1, 2]


def starts_processes(seconds: float = 600) -> None:
    """A rank with children of its own, one of which ignores polite requests, and then a hang."""
    subprocess.Popen(["sleep", str(seconds)])
    subprocess.Popen(
        [
            sys.executable,
            "-c",
            f"import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep({seconds})",
        ]
    )
    print("started", flush=True)
    time.sleep(seconds)


def leaves_children_behind() -> dict[str, Any]:
    return {"child": subprocess.Popen(["sleep", "600"]).pid}


def torchrun_main() -> None:
    """Entry for torchrun and for no launcher at all: the same set-up call serves both."""
    made = init_process_group(timeout_s=30)
    value = torch.ones(1)
    dist.all_reduce(value)
    print(f"made={made} world={dist.get_world_size()} sum={value.item():g} device={device()}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    torchrun_main()
