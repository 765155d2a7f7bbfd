"""How one operation is computed fast: a file an operation, each with its plain-PyTorch reference beside the fast version.

``MOE_LAB_OPS=reference`` makes every public function here take its reference; it is the first thing to try when a
number looks wrong. Lesson: 03_gpu_resident_routing.
"""

from __future__ import annotations

import os


def reference_only() -> bool:
    """True when ``MOE_LAB_OPS=reference`` is set."""
    value = os.environ.get("MOE_LAB_OPS", "auto")
    if value not in ("auto", "reference"):
        from moe_lab.errors import ConfigError

        raise ConfigError(f"MOE_LAB_OPS is {value!r}, but must be auto or reference")
    return value == "reference"
