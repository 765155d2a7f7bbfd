"""Entry points that ranks and shells call. Lesson: 00_start_here."""

from __future__ import annotations

from typing import Any

import torch

from moe_lab import presets
from moe_lab.config import TrainConfig
from moe_lab.fields import from_dict, override
from moe_lab.launch.worker import init_process_group
from moe_lab.records import run_folder
from moe_lab.train.store import with_initial_model
from moe_lab.train.trainer import Trainer, check_supported


def fit_ranks(config: dict[str, Any], folder: str | None = None) -> dict[str, Any]:
    """Train ``config`` (from ``fields.to_dict``) as one rank, with the record in ``folder``; returns the results.

    ``launch.run(fit_ranks, ranks=4, config=..., folder=...)`` runs it.
    """
    return Trainer(from_dict(TrainConfig, config), folder).fit()


def cli_train(preset: str, overrides: list[str], out: str | None = None) -> int:
    """``moe-lab train``: one process, or one rank of those that torchrun started.

    ``overrides``: ``name=value`` texts; ``initial_model=FOLDER`` also takes the model's configuration from there.
    """
    config = presets.get(preset)
    for text in overrides:
        name, _, folder = text.partition("=")
        if name == "initial_model" and folder:
            config = with_initial_model(config, folder)
    config = override(config, overrides)
    made = init_process_group()
    try:
        check_supported(config)
        run_dir = out or str(run_folder(config.name))
        results = Trainer(config, run_dir).fit()
    finally:
        if made:
            torch.distributed.destroy_process_group()
    if results["sample after"] is not None:
        print(f"result: {run_dir}")
        for name in ("final train CE loss", "final validation CE loss", "tokens per second"):
            print(f"{name}: {results[name]}")
    return 0
