"""The doctor's look at the machine: memory, GPUs, CUDA, process groups."""

from __future__ import annotations

import os
import shutil
import subprocess
from typing import Any

import psutil

from moe_lab.records import environment

GIB = 1 << 30


def host() -> dict[str, Any]:
    """Name, system, processor, and memory in GiB: all of it, what is free, and what shared memory may take."""
    memory = psutil.virtual_memory()
    shared = shutil.disk_usage("/dev/shm").free / GIB if os.path.isdir("/dev/shm") else None
    facts = {key: environment()[key] for key in ("host", "platform", "processor", "cores")}
    return {
        **facts,
        "memory_gib": round(memory.total / GIB, 1),
        "available_gib": round(memory.available / GIB, 1),
        "shared_memory_gib": None if shared is None else round(shared, 1),
    }


def gpus(torch: Any) -> list[dict[str, Any]]:
    """One entry a CUDA device that torch sees; initialises CUDA in this process."""
    if torch is None or not torch.cuda.is_available():
        return []
    gpus = []
    for index in range(torch.cuda.device_count()):
        card = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        gpus.append({
            "index": index, "name": card.name, "capability": f"{card.major}.{card.minor}",
            "memory_gib": round(total / GIB, 1), "free_gib": round(free / GIB, 1), "multiprocessors": card.multi_processor_count,
        })  # fmt: skip
    return gpus


def cuda(torch: Any) -> dict[str, Any]:
    """CUDA as torch was built for it, the NCCL it loads, and the compiler on the PATH."""
    nccl = None
    if torch is not None and torch.cuda.is_available():
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
    nvcc = shutil.which("nvcc")
    release = None
    if nvcc:
        text = subprocess.run([nvcc, "--version"], capture_output=True, text=True).stdout
        release = text.partition("release ")[2].partition(",")[0] or "unknown"
    return {
        "torch_cuda": getattr(getattr(torch, "version", None), "cuda", None),
        "nccl": nccl,
        "nvcc": release,
    }


def backends(torch: Any) -> dict[str, bool]:
    """Which process-group backends can connect ranks here."""
    if torch is None or not torch.distributed.is_available():
        return {"gloo": False, "nccl": False, "mpi": False}
    group = torch.distributed
    return {
        "gloo": group.is_gloo_available(),
        "nccl": group.is_nccl_available() and torch.cuda.is_available(),
        "mpi": group.is_mpi_available(),
    }
