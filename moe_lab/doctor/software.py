"""The doctor's look at the software: packages, JupyterLab's kernel, the browser, the data; and how to get what is missing.

A missing thing is ``{"what", "for", "install"}``.
"""

from __future__ import annotations

import os
import shutil
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from moe_lab.doctor.paths import item


def version(package: str) -> str | None:
    """The installed version of a package, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def missing_packages() -> list[dict[str, str]]:
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
        has = version(requirement.name)
        if not (needed or extra) or (has and requirement.specifier.contains(has, prereleases=True)):
            continue
        what = f"{requirement.name} {requirement.specifier}".strip()
        what += f" (found {has})" if has else ""
        line = f"{sys.executable} -m pip install '{requirement.name}{requirement.specifier}'"
        found.append({"what": what, "for": "moe_lab" if needed else "the tests", "install": line})
    return found


def tools(missing: list[dict[str, str]]) -> list[dict[str, Any]]:
    """Programs and settings around the package: Triton, the kernel that JupyterLab starts, Chromium for one test."""
    triton = version("triton")
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
        item("triton", triton is not None, f"{triton}" if triton else "comes with torch for CUDA; the plain PyTorch operations serve without it"),
        item("kernel python3", kernel, kernel_note),
        item("chromium", browser is not None, browser or "only the browser test needs it"),
        item("data/kjv.txt", text, text_note),
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
