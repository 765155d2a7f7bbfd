"""The doctor's look at the paths a computation can take: expert transports and number formats.

An item is ``{"name", "usable", "note"}``. A path is usable if this version of moe_lab can train with it, by the trainer's
own check, and the machine has what it needs.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from typing import Any, get_args

NCCL_FOR_DEEPEP = (2, 30, 4)


def item(name: str, usable: bool, note: str) -> dict[str, Any]:
    """One line of a report: a thing, whether it can be used here, and why or how."""
    return {"name": name, "usable": usable, "note": note}


def trainable(*overrides: str) -> str | None:
    """None if this version can train the laptop preset with ``overrides``, else why it cannot."""
    try:
        from moe_lab import presets
        from moe_lab.errors import MoeLabError
        from moe_lab.fields import override
        from moe_lab.train.describe import check_supported
    except ImportError as error:
        return f"moe_lab cannot be loaded ({error})"
    try:
        check_supported(override(presets.get("laptop"), list(overrides)))
    except MoeLabError:
        return "not in this version of moe_lab"
    return None


def transports(torch: Any, found: dict[str, Any], missing: list[dict[str, str]]) -> list[dict[str, Any]]:
    """How tokens reach experts on other ranks, and whether this machine has what each way needs."""
    if torch is None:
        return []
    from moe_lab.config import Transport

    machine: dict[str, Callable[[], tuple[bool, str]]] = {
        "local": lambda: (True, "all experts on each rank"),
        "all_to_all": lambda: _needs_backend(found["backends"]),
        "rowwise": lambda: _needs_shared_memory(found),
        "deepep": lambda: _needs_deepep(found, missing),
    }
    items = []
    for name in get_args(Transport):
        possible, note = machine[name]() if name in machine else (False, "unknown to the doctor")
        absent = trainable(*([] if name == "local" else ["parallel.ep=2"]), f"parallel.transport={name}")
        items.append(
            item(name, possible and absent is None, f"{absent}; the machine: {note}" if absent else note)
        )
    return items


def _needs_backend(backends: dict[str, bool]) -> tuple[bool, str]:
    there = [name for name, available in backends.items() if available]
    return bool(there), f"over {', '.join(there)}" if there else "this torch has no process-group backend"


def _needs_shared_memory(found: dict[str, Any]) -> tuple[bool, str]:
    if found["gpus"]:
        if importlib.util.find_spec("torch.distributed._symmetric_memory") is None:
            return False, "this torch has no symmetric memory"
        return True, "torch symmetric memory on CUDA"
    free = found["machine"]["shared_memory_gib"]
    if free is None:
        return True, "POSIX shared memory"
    return free > 0.0, f"POSIX shared memory, {free} GiB free in /dev/shm"


def _needs_deepep(found: dict[str, Any], missing: list[dict[str, str]]) -> tuple[bool, str]:
    """DeepEP v2 runs on Hopper and newer; its kernels are compiled at run time, and need a newer NCCL than torch's."""
    if not found["gpus"] or float(found["gpus"][0]["capability"]) < 9.0:
        return False, "needs NVIDIA GPUs of capability 9.0 or newer"
    lacks = []
    pip = f"{sys.executable} -m pip install"
    if importlib.util.find_spec("deep_ep") is None:
        lacks.append(
            (
                "DeepEP v2",
                f"{pip} -e '.[deepep]'  # wheels for torch 2.13.0 with CUDA 13, Python up to 3.13",
            )
        )
    nccl = found["cuda"]["nccl"]
    if nccl is None or tuple(map(int, nccl.split("."))) < NCCL_FOR_DEEPEP:
        lacks.append(
            (f"NCCL 2.30.4 or newer (torch loads {nccl})", f"{pip} --no-deps 'nvidia-nccl-cu13==2.30.7'")
        )
    if found["cuda"]["nvcc"] is None:
        lacks.append(
            ("nvcc", "put the CUDA toolkit's bin folder on PATH (on clusters often: module load cuda)")
        )
    missing.extend({"what": what, "for": "transport deepep", "install": line} for what, line in lacks)
    return (
        not lacks,
        f"lacks {', '.join(what for what, _ in lacks)}" if lacks else "package, NCCL and nvcc are there",
    )


def precision(torch: Any, gpus: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Number formats and the path each would take here."""
    if torch is None:
        return []
    from moe_lab.config import Precision

    capability = float(gpus[0]["capability"]) if gpus else 0.0
    bf16 = (
        "GPU tensor cores"
        if capability >= 8.0
        else f"on the CPU ({torch.backends.cpu.get_cpu_capability()}), for its rounding rather than its speed"
    )
    native = "native, needs capability 10.0: this card has it; not verified on hardware"
    fp8 = "FP8 tensor cores" if capability >= 9.0 else "needs a GPU of capability 9.0 or newer"
    machine = {
        "fp64": (True, "for comparisons"),
        "fp32": (True, "GPU" if gpus else "CPU"),
        "bf16": (True, bf16),
        "mxfp8": (
            True,
            native
            if capability >= 10.0
            else "emulation, exact in the format (native needs capability 10.0; not verified on hardware)",
        ),
        "fp8_rowwise": (capability >= 9.0, fp8),
    }
    items = []
    for name in get_args(Precision):
        possible, note = machine.get(name, (False, "unknown to the doctor"))
        absent = trainable(f"precision={name}")
        items.append(
            item(name, possible and absent is None, f"{absent}; the machine: {note}" if absent else note)
        )
    return items
