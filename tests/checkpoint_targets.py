"""Functions that the checkpoint tests run on ranks. Several cases a call, since starting ranks is the slow part."""

from __future__ import annotations

import os
import signal
from typing import Any

from moe_lab.config import TrainConfig
from moe_lab.fields import from_dict
from moe_lab.parallel import world
from moe_lab.train import Trainer, checkpoint


def fit(cases: list[dict[str, Any]]) -> dict[str, Any]:
    """Train each case: ``config``, ``folder`` and, where it goes on from one, ``resume``."""
    for case in cases:
        Trainer(
            from_dict(TrainConfig, case["config"]), case["folder"], resume=case.get("resume"), show=False
        ).fit()
    return {}


def fit_and_die(config: dict[str, Any], folder: str, rank: int, step: int, where: str) -> dict[str, Any]:
    """Train until ``rank`` kills itself in step ``step``: after backward ("backward"), while it writes its part of the
    checkpoint of that step ("write"), or, for rank 0, when all parts are written but not yet named ("rename")."""
    trainer = Trainer(from_dict(TrainConfig, config), folder, show=False)

    def dying(function: Any, due: Any) -> Any:
        def call(*arguments: Any, **named: Any) -> Any:
            if world()[0] == rank and due():
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments, **named)

        return call

    if where == "backward":
        trainer.engine.finish = dying(trainer.engine.finish, lambda: trainer.step == step - 1)  # type: ignore[method-assign]
    elif where == "write":
        from torch.distributed.checkpoint.filesystem import FileSystemWriter

        FileSystemWriter.write_data = dying(FileSystemWriter.write_data, lambda: trainer.step >= step)  # type: ignore[method-assign]
    else:
        checkpoint._publish = dying(checkpoint._publish, lambda: trainer.step >= step)
    trainer.fit()
    return {}
