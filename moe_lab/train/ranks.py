"""Entry points that ranks and shells call. Lesson: 00_start_here."""

from __future__ import annotations

import gc
import math
import os
import sys
import threading
from typing import Any

import torch
import torch.distributed as dist

from moe_lab import presets
from moe_lab.config import TrainConfig
from moe_lab.errors import ConfigError, LaunchError
from moe_lab.fields import from_dict, override
from moe_lab.launch.worker import init_process_group
from moe_lab.parallel import world
from moe_lab.records import run_folder
from moe_lab.train.describe import check_supported
from moe_lab.train.store import with_initial_model
from moe_lab.train.trainer import Trainer


def fit_ranks(config: dict[str, Any], folder: str | None = None, resume: str | None = None) -> dict[str, Any]:
    """Train ``config`` (from ``fields.to_dict``) as one rank, with the record in ``folder``; returns the results.

    ``launch.run(fit_ranks, ranks=4, config=..., folder=...)`` runs it. ``resume``: as :class:`Trainer` takes it.
    """
    return Trainer(from_dict(TrainConfig, config), folder, resume=resume).fit()


def cli_train(
    preset: str,
    overrides: list[str],
    out: str | None = None,
    resume: str | None = None,
    timeout_s: float = 600,
) -> int:
    """``moe-lab train``: one process, or one rank of those that torchrun started.

    ``overrides``: ``name=value`` texts; ``initial_model=FOLDER`` also takes the model's configuration from there.
    ``resume``: "auto" or a folder; ``timeout_s``: how long ranks wait for each other, when they meet and in a collective.
    """
    if not 0 < timeout_s < math.inf:
        raise ConfigError(f"--timeout is {timeout_s} seconds, but must be above 0")
    if resume == "auto" and out is None:
        raise ConfigError("--resume auto goes on with the run in --out DIR, but --out is not given")
    config = presets.get(preset)
    for text in overrides:
        name, _, folder = text.partition("=")
        if name == "initial_model" and folder:
            config = with_initial_model(config, folder)
    config = override(config, overrides)
    made = join(timeout_s)
    try:
        check_supported(config)
        rank = world()[0]
        run_dir = [out or str(run_folder(config.name))]
        if world()[1] > 1:
            torch.distributed.broadcast_object_list(run_dir, src=0)
        results = Trainer(config, run_dir[0], resume=resume).fit()
        # gloo's threads let go of Python objects after a collective; an interpreter that ends under them aborts. Ranks
        # that have nothing more to do would end at once, so all end together, with what held the groups gone.
        gc.collect()
        if world()[1] > 1:
            dist.barrier()
    finally:
        if made:
            torch.distributed.destroy_process_group()
    if rank == 0:
        print(f"result: {run_dir[0]}")
        for name in ("final train CE loss", "final validation CE loss", "tokens per second"):
            if results[name] is not None:
                print(f"{name}: {results[name]}")
    return 0


def join(timeout_s: float) -> bool:
    """:func:`~moe_lab.launch.worker.init_process_group`, with what may go wrong between ranks that meet as one sentence.

    :class:`LaunchError` for a rank that does not come within ``timeout_s`` and for a port that something else serves.
    """
    where = f"{os.environ.get('MASTER_ADDR', '?')}:{os.environ.get('MASTER_PORT', '?')}"
    who = f"rank {os.environ.get('RANK', '0')} of {os.environ.get('WORLD_SIZE', '1')} could not join"
    absent = (
        f"{who}: the others did not come to {where} within {timeout_s:g} s: start all {os.environ.get('WORLD_SIZE')} ranks, "
        "see that no other program serves that port, or give --timeout more seconds"
    )

    def give_up() -> None:
        print(absent, file=sys.stderr, flush=True)
        os._exit(LaunchError.exit_status)

    # torch waits without limit for a server that takes the connection and says nothing, and cannot be interrupted in it.
    watchdog = threading.Timer(1.5 * timeout_s + 2, give_up)
    watchdog.daemon = True
    watchdog.start()
    try:
        return init_process_group(timeout_s)
    except (dist.DistError, ValueError, RuntimeError) as error:
        text = str(error)
        if "EADDRINUSE" in text or "address already in use" in text:
            raise LaunchError(
                f"{who}: {where} is in use by another program: set another MASTER_PORT, or start with torchrun --standalone"
            ) from error
        if "timed out" in text.lower() or "timeout" in text.lower():
            raise LaunchError(absent) from error
        raise LaunchError(
            f"{who}: no connection at {where}: {(text.splitlines() or [type(error).__name__])[0]}"
        ) from error
    finally:
        watchdog.cancel()
