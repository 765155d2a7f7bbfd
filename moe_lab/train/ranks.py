"""Entry points that ranks and shells call. Lesson: 00_start_here."""

from __future__ import annotations

from typing import Any

from moe_lab import launch, presets
from moe_lab.config import TrainConfig
from moe_lab.fields import from_dict, override, to_dict
from moe_lab.records import run_folder
from moe_lab.train.trainer import Trainer, check_supported


def fit_ranks(config: dict[str, Any], run_dir: str | None = None) -> dict[str, Any]:
    """Train ``config`` (from ``fields.to_dict``) as one rank; what ``launch.run(fit_ranks, ...)`` runs. Returns the results."""
    return Trainer(from_dict(TrainConfig, config), run_dir).fit()


def cli_train(preset: str, overrides: list[str], out: str | None = None) -> int:
    """``moe-lab train``: one process, or one rank of those that torchrun started."""
    config = override(presets.get(preset), overrides)
    check_supported(config)
    launch.init_process_group()
    run_dir = out or str(run_folder(config.name))
    results = Trainer(config, run_dir).fit()
    if results["sample after"] is not None:
        print(f"result: {run_dir}")
        for name in ("final train CE loss", "final validation CE loss", "tokens per second"):
            print(f"{name}: {results[name]}")
    return 0


__all__ = ["cli_train", "fit_ranks", "to_dict"]
