"""``moe-lab import`` and ``moe-lab export``. Lesson: 08_full_stack."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from moe_lab.interop.families import family_of
from moe_lab.interop.reader import import_checkpoint, read_hf_config
from moe_lab.interop.writer import export_checkpoint
from moe_lab.plan import count_parameters
from moe_lab.train.store import read_config


def cli_import(source: str, out: str, as_json: bool = False) -> int:
    """``moe-lab import HF_DIR --out DIR [--json]``: write a Hugging Face checkpoint as a model of ours."""
    folder = import_checkpoint(source, out)
    summary = _summary(folder, _architecture(source))
    if as_json:
        print(json.dumps(summary))
    else:
        print(_sentence(summary, "imported from"))
        print(f"train on: moe-lab train --preset laptop initial_model={folder}")
    return 0


def cli_export(source: str, out: str, architecture: str | None = None, as_json: bool = False) -> int:
    """``moe-lab export DIR --out DIR [--architecture NAME] [--json]``: write a model of ours as a Hugging Face checkpoint."""
    folder = export_checkpoint(source, out, architecture)
    counts = _summary(Path(source), _architecture(folder)) | {"out": str(folder)}
    print(json.dumps(counts) if as_json else _sentence(counts, "exported as"))
    return 0


def _architecture(folder: str | Path) -> str:
    return family_of(read_hf_config(Path(folder))).name


def _summary(ours: Path, architecture: str) -> dict[str, Any]:
    counts = count_parameters(read_config(ours))
    return {
        "out": str(ours),
        "architecture": architecture,
        "parameters": {"total": counts.total, "active": counts.active},
    }


def _sentence(summary: dict[str, Any], verb: str) -> str:
    total, active = summary["parameters"]["total"], summary["parameters"]["active"]
    return f"{summary['out']}: {verb} {summary['architecture']}, {total:,} parameters, {active:,} active"
