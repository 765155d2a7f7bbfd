"""``moe-lab doctor``: what this machine can run, on which path, and what is missing.

:func:`examine` looks, :func:`report` makes text of it. Nothing is guessed: versions come from the installed packages,
devices from torch, and what this version of moe_lab can train with from the trainer's own check, so a part that is
described in the configuration but not built is listed as such. First used in lesson 00_start_here.
"""

from __future__ import annotations

import importlib
from typing import Any

from moe_lab.doctor import machine, paths, software
from moe_lab.records import environment

MEMORY_NEEDED_GIB = 2.0  # four ranks of the laptop preset, each with torch, and the notebook's kernel
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


def examine() -> dict[str, Any]:
    """Look at this machine and this Python environment.

    ``ready``: whether the laptop preset can be trained; ``blocking``: why not. ``versions``, ``machine`` (memory in GiB),
    ``gpus``, ``backends`` (process groups), and lists of ``{"name", "usable", "note"}``: ``transports``, ``precision``,
    ``tools``. ``missing``: ``{"what", "for", "install"}``, the last one a shell command or a sentence.
    """
    torch = _import("torch")
    missing = software.missing_packages()
    versions = {name: software.version(name) for name in ("moe_lab", *PACKAGES)}
    found: dict[str, Any] = {
        "versions": {"python": environment()["python"], **versions},
        "machine": machine.host(),
        "gpus": machine.gpus(torch),
        "cuda": machine.cuda(torch),
        "backends": machine.backends(torch),
        "tools": software.tools(missing),
    }
    found["transports"] = paths.transports(torch, found, missing)
    found["precision"] = paths.precision(torch, found["gpus"])
    found["missing"] = missing
    found["blocking"] = _blocking(found)
    found["ready"] = not found["blocking"]
    return found


def _import(name: str) -> Any:
    """The module, or None where it is not installed or cannot be loaded."""
    try:
        return importlib.import_module(name)
    except (ImportError, OSError):
        return None


def _blocking(found: dict[str, Any]) -> list[str]:
    """Why the laptop preset cannot be trained here; empty if it can."""
    why = [f"{item['what']} is missing" for item in found["missing"] if item["for"] == "moe_lab"]
    if found["transports"] and (reason := paths.trainable()):
        why.append(reason)
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
    host, cuda = found["machine"], found["cuda"]
    lines = [
        "versions    " + ", ".join(f"{name} {version or '-'}" for name, version in found["versions"].items())
    ]
    lines.append(
        f"machine     {host['host']}: {host['processor']}, {host['cores']} cores, "
        f"{host['available_gib']} of {host['memory_gib']} GiB free, {host['platform']}"
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
