"""``moe-lab doctor``: what this machine can run, on which path, and what is missing.

:func:`examine` looks, :func:`report` makes text of it. Nothing is guessed: versions come from the installed packages,
devices from torch, and what this version of moe_lab can train with from the trainer's own check, so a part that is
described in the configuration but not built is listed as such. First used in lesson 00_start_here.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any, get_args

import psutil

from moe_lab.records import environment

GIB = 1 << 30
MEMORY_NEEDED_GIB = (
    2.0  # four ranks of the laptop preset, each with its own copy of torch, and the notebook's kernel
)
PACKAGES = (
    "torch",
    "triton",
    "numpy",
    "transformers",
    "tokenizers",
    "jupyterlab",
    "papermill",
    "ipywidgets",
    "matplotlib",
)
NCCL_FOR_DEEPEP = (2, 30, 4)


def examine() -> dict[str, Any]:
    """Look at this machine and this Python environment.

    ``ready``: whether the laptop preset can be trained; ``blocking``: why not. ``versions``, ``machine`` (memory in GiB),
    ``gpus``, ``backends`` (process groups), and lists of ``{"name", "usable", "note"}``: ``transports``, ``precision``,
    ``tools``. ``missing``: ``{"what", "for", "install"}``, the last one a shell command or a sentence.
    """
    torch = _import("torch")
    gpus = _gpus(torch)
    missing = _missing_packages()
    tools = _tools(missing)
    found: dict[str, Any] = {
        "versions": {
            "moe_lab": _version("moe_lab"),
            "python": environment()["python"],
            **{p: _version(p) for p in PACKAGES},
        },
        "machine": _machine(),
        "gpus": gpus,
        "cuda": _cuda(torch),
        "backends": _backends(torch),
    }
    found["transports"] = _transports(torch, found, missing)
    found["precision"] = _precision(torch, gpus)
    found["tools"] = tools
    found["blocking"] = _blocking(found, missing)
    found["ready"] = not found["blocking"]
    found["missing"] = missing
    return found


def _import(name: str) -> Any:
    """The module, or None where it is not installed or cannot be loaded."""
    try:
        return importlib.import_module(name)
    except (ImportError, OSError):
        return None


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _machine() -> dict[str, Any]:
    memory = psutil.virtual_memory()
    shared = shutil.disk_usage("/dev/shm").free / GIB if os.path.isdir("/dev/shm") else None
    facts = {key: environment()[key] for key in ("host", "platform", "processor", "cores")}
    return {
        **facts,
        "memory_gib": round(memory.total / GIB, 1),
        "available_gib": round(memory.available / GIB, 1),
        "shared_memory_gib": None if shared is None else round(shared, 1),
    }


def _gpus(torch: Any) -> list[dict[str, Any]]:
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


def _cuda(torch: Any) -> dict[str, Any]:
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


def _backends(torch: Any) -> dict[str, bool]:
    if torch is None or not torch.distributed.is_available():
        return {"gloo": False, "nccl": False, "mpi": False}
    group = torch.distributed
    return {
        "gloo": group.is_gloo_available(),
        "nccl": group.is_nccl_available() and torch.cuda.is_available(),
        "mpi": group.is_mpi_available(),
    }


def _item(name: str, usable: bool, note: str) -> dict[str, Any]:
    return {"name": name, "usable": usable, "note": note}


def _trainable(*overrides: str) -> str | None:
    """None if this version can train the laptop preset with ``overrides``, else why it cannot."""
    from moe_lab import presets
    from moe_lab.errors import MoeLabError
    from moe_lab.fields import override
    from moe_lab.train.trainer import check_supported

    try:
        check_supported(override(presets.get("laptop"), list(overrides)))
    except MoeLabError:
        return "not in this version of moe_lab"
    return None


def _transports(torch: Any, found: dict[str, Any], missing: list[dict[str, str]]) -> list[dict[str, Any]]:
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
        absent = _trainable(*([] if name == "local" else ["parallel.ep=2"]), f"parallel.transport={name}")
        items.append(
            _item(name, possible and absent is None, f"{absent}; the machine: {note}" if absent else note)
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
                f"{pip} 'moe_lab[deepep]'  # wheels for torch 2.13.0 with CUDA 13, Python up to 3.13",
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


def _precision(torch: Any, gpus: list[dict[str, Any]]) -> list[dict[str, Any]]:
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
        absent = _trainable(f"precision={name}")
        items.append(
            _item(name, possible and absent is None, f"{absent}; the machine: {note}" if absent else note)
        )
    return items


def _missing_packages() -> list[dict[str, str]]:
    """Requirements of moe_lab, and of its tests, that this environment does not meet."""
    from packaging.requirements import Requirement

    try:
        requirements = metadata.requires("moe_lab") or []
    except metadata.PackageNotFoundError:
        line = f"{sys.executable} -m pip install -e ."
        return [{"what": "moe_lab as an installed package", "for": "moe_lab", "install": line}]
    found = []
    for text in requirements:
        requirement = Requirement(text)
        extra = "test" if requirement.marker and requirement.marker.evaluate({"extra": "test"}) else ""
        needed = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        version = _version(requirement.name)
        if not (needed or extra) or (version and requirement.specifier.contains(version, prereleases=True)):
            continue
        what = f"{requirement.name} {requirement.specifier}".strip() + (
            f" (found {version})" if version else ""
        )
        line = f"{sys.executable} -m pip install '{requirement.name}{requirement.specifier}'"
        found.append({"what": what, "for": "moe_lab" if needed else "the tests", "install": line})
    return found


def _tools(missing: list[dict[str, str]]) -> list[dict[str, Any]]:
    """Programs and settings around the package: Triton, the kernel that JupyterLab starts, Chromium for one test."""
    triton = _version("triton")
    kernel, kernel_note = _kernelspec()
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if not kernel:
        line = f"{sys.executable} -m ipykernel install --sys-prefix --name python3"
        missing.append({"what": "kernel python3 of this environment", "for": "JupyterLab", "install": line})
    if browser is None:
        line = "sudo apt-get install -y chromium"
        missing.append({"what": "Chromium", "for": "the browser test", "install": line})
    text, text_note = _data()
    return [
        _item("triton", triton is not None, f"{triton}" if triton else "comes with torch for CUDA; the plain PyTorch operations serve without it"),
        _item("kernel python3", kernel, kernel_note),
        _item("chromium", browser is not None, browser or "only the browser test needs it"),
        _item("data/kjv.txt", text, text_note),
    ]  # fmt: skip


def _kernelspec() -> tuple[bool, str]:
    """Whether the kernel ``python3`` that JupyterLab would start is this environment's. Notebook jobs do not ask."""
    try:
        from jupyter_client.kernelspec import KernelSpecManager, NoSuchKernel
    except ImportError:
        return False, "jupyter_client is not installed"
    try:
        spec = KernelSpecManager().get_kernel_spec("python3")
    except NoSuchKernel:
        return False, "there is none"
    program = spec.argv[0]
    own = os.path.basename(program) == program or os.path.realpath(program) == os.path.realpath(
        sys.executable
    )
    return own, spec.resource_dir if own else f"{spec.resource_dir} starts {program}, another environment"


def _data() -> tuple[bool, str]:
    """The text that the laptop preset trains on."""
    for place in (Path.cwd(), Path(__file__).resolve().parents[1]):
        path = place / "data" / "kjv.txt"
        if path.is_file():
            return True, str(path)
    return False, "not found here or beside the package: work in the repository's folder"


def _blocking(found: dict[str, Any], missing: list[dict[str, str]]) -> list[str]:
    """Why the laptop preset cannot be trained here; empty if it can."""
    why = [f"{item['what']} is missing" for item in missing if item["for"] == "moe_lab"]
    if found["transports"] and _trainable():
        why.append("this version of moe_lab cannot train it")
    if not found["backends"]["gloo"]:
        why.append("torch has no gloo, which connects ranks on CPUs")
    if found["machine"]["available_gib"] < MEMORY_NEEDED_GIB:
        why.append(
            f"{found['machine']['available_gib']} GiB of memory are free, but 4 ranks need about {MEMORY_NEEDED_GIB:g}"
        )
    if not all(tool["usable"] for tool in found["tools"] if tool["name"] == "data/kjv.txt"):
        why.append("the text data/kjv.txt is not there")
    return why


def report(found: dict[str, Any]) -> str:
    """What :func:`examine` found, as text for people."""
    machine, cuda = found["machine"], found["cuda"]
    lines = [
        "versions    " + ", ".join(f"{name} {version or '-'}" for name, version in found["versions"].items())
    ]
    lines.append(
        f"machine     {machine['host']}: {machine['processor']}, {machine['cores']} cores, "
        f"{machine['available_gib']} of {machine['memory_gib']} GiB free, {machine['platform']}"
    )
    for gpu in found["gpus"]:
        lines.append(
            f"GPU {gpu['index']}       {gpu['name']}, capability {gpu['capability']}, {gpu['free_gib']} of {gpu['memory_gib']} GiB free"
        )
    if not found["gpus"]:
        lines.append("GPU         none")
    lines.append(
        f"CUDA        torch built for {cuda['torch_cuda'] or 'none'}, NCCL {cuda['nccl'] or '-'}, nvcc {cuda['nvcc'] or '-'}"
    )
    lines.append(
        "ranks over  "
        + ", ".join(f"{name} {'yes' if there else 'no'}" for name, there in found["backends"].items())
    )
    for section in ("transports", "precision", "tools"):
        lines.append(section)
        lines += [
            f"  {'yes' if item['usable'] else 'no ':<3} {item['name']:<15} {item['note']}"
            for item in found[section]
        ]
    if found["missing"]:
        lines.append("missing, and how to get it")
        lines += [
            f"  {item['what']}, for {item['for']}:\n      {item['install']}" for item in found["missing"]
        ]
    verdict = "yes" if found["ready"] else "no: " + "; ".join(found["blocking"])
    return "\n".join([*lines, f"can train the laptop preset: {verdict}"])
