"""Tests that need hardware or a package this machine lacks are skipped by their marker, with the reason."""

from __future__ import annotations

import importlib.util
import signal

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip ``gpu`` without a CUDA device, ``multigpu`` without two, ``deepep`` without two and the package."""
    devices = torch.cuda.device_count()
    package = importlib.util.find_spec("deep_ep") is not None
    lacks = {
        "gpu": "" if devices >= 1 else "needs a CUDA device",
        "multigpu": "" if devices >= 2 else f"needs two CUDA devices, this machine has {devices}",
        "deepep": "" if devices >= 2 and package else "needs DeepEP and two CUDA devices",
    }
    for item in items:
        for marker, reason in lacks.items():
            if reason and item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))


# A shell that starts a job in the background has it ignore SIGINT, and so would every process that a test starts.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
