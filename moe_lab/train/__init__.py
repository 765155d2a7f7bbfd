"""The loop: data, steps, evaluation, metrics, samples of text. Lesson: 00_start_here.

``Trainer(cfg).fit()`` trains in this process; ``launch.run(fit_ranks, ranks=4, config=..., folder=...)`` trains over
several; ``moe-lab train`` is the same from a shell.
"""

from moe_lab.train.checkpoint import Checkpoints, latest
from moe_lab.train.generate import generate
from moe_lab.train.ranks import cli_train, fit_ranks
from moe_lab.train.store import load_model, save_model
from moe_lab.train.trainer import Trainer

__all__ = [
    "Checkpoints",
    "Trainer",
    "cli_train",
    "fit_ranks",
    "generate",
    "latest",
    "load_model",
    "save_model",
]
