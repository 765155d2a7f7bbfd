"""Checkpoints: all that a run needs to go on to the bit, written so that a kill at any moment leaves whole ones only.

``<run>/checkpoints/step-000100/`` holds torch's distributed-checkpoint files (fp32 masters and moments of every parameter, router
biases, optimizer counters; the bf16 weights are made anew from the masters) and ``state.json`` (step, configuration, data
fingerprint, size of every file). It is written under a temporary name by all ranks and renamed by rank 0 when all have
finished. The step alone says which data comes next. Report, section 12. Lesson: 04_data_parallel.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import shutil
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

from moe_lab.config import TrainConfig
from moe_lab.errors import ConfigError, DataError
from moe_lab.fields import flatten, to_dict
from moe_lab.parallel import ShardedDataParallel, world
from moe_lab.parallel.buckets import Piece
from moe_lab.records import RunRecord, read_metrics, utc_now, write_json
from moe_lab.train.store import FREE

FOLDER, STATE, FORMAT = "checkpoints", "state.json", 1
# What says where in the data a step is: the data's own fingerprint says the rest.
POSITION = ("sequence_length", "sequences_per_step", "data.seed")
LIMIT = timedelta(minutes=30)  # for the slowest rank's disk
_NAME = re.compile(r"step-\d{6,}")


def pieces(model: nn.Module, engine: ShardedDataParallel) -> list[Piece]:
    """All live tensors that a checkpoint stores: the engine's state and the model's buffers, such as router biases."""
    state = engine.state()
    persistent = model.state_dict()
    for name, buffer in model.named_buffers():
        if name in persistent:
            state.append(Piece(f"{name}.buffer", buffer.numel(), 0, buffer.detach().view(-1)))
    return state


class Checkpoints:
    """Writes the checkpoints of the run in ``run_dir``, one at a time. All ranks make one and call it alike.

    ``keep``: how many stay (0: all). ``background``: a thread writes from a copy, and the next :meth:`save` or
    :meth:`wait` raises what went wrong in it.
    """

    def __init__(self, run_dir: str | Path, keep: int, background: bool) -> None:
        self.folder = Path(run_dir) / FOLDER
        self.keep, self.background = keep, background
        # A group of its own: a thread's collectives must not mix with the training's, and files need no GPU.
        self.group = dist.new_group(backend="gloo", timeout=LIMIT) if world()[1] > 1 else None
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def save(self, model: nn.Module, engine: ShardedDataParallel, state: dict[str, Any]) -> None:
        """Write the checkpoint of ``state["step"]``; in the background, return when the tensors are copied.

        ``state``: what ``state.json`` says, without its list of files. Raises :class:`DataError` on every rank if one
        rank cannot write; earlier checkpoints stay.
        """
        self.wait()
        live = pieces(model, engine)
        if not self.background:
            self._write(live, state)
            return
        # A copy even of what is in host memory already: training goes on and changes it.
        copies = [dataclasses.replace(p, data=p.data.to("cpu", copy=True)) for p in live]
        self._thread = threading.Thread(
            target=self._try, args=(copies, state), name="checkpoint", daemon=True
        )
        self._thread.start()

    def wait(self) -> None:
        """Wait for the save in the background, if there is one, and raise its error, if it had one."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _try(self, copies: list[Piece], state: dict[str, Any]) -> None:
        try:
            self._write(copies, state)
        except BaseException as error:
            self._error = error

    def _write(self, parts: list[Piece], state: dict[str, Any]) -> None:
        from moe_lab.parallel import chunks

        final = self.folder / f"step-{state['step']:06d}"
        temporary = self.folder / f".{final.name}.tmp"
        try:
            self._on_rank_0(lambda: _make(temporary), final)
            try:
                chunks.save(parts, temporary, self.group)
            except DataError as error:
                raise DataError(f"cannot write the checkpoint {final}: {error}") from error
            self._on_rank_0(lambda: _publish(temporary, final, state), final)
        except DataError:
            if world()[0] == 0:
                shutil.rmtree(temporary, ignore_errors=True)
            raise
        if world()[0] == 0 and self.keep:
            for old in complete(self.folder.parent)[: -self.keep]:
                # Renamed first: a kill while files are removed leaves no half of a checkpoint under a whole one's name.
                gone = self.folder / f".{old.name}.tmp"
                with contextlib.suppress(OSError):
                    os.rename(old, gone)
                    shutil.rmtree(gone)

    def _on_rank_0(self, action: Any, final: Path) -> None:
        """Do ``action`` on rank 0; all ranks go on after it, or raise the same :class:`DataError` if it failed."""
        problem = [None]
        if world()[0] == 0:
            try:
                action()
            except Exception as error:  # whatever it is, the other ranks wait to hear of it
                reason = getattr(error, "strerror", None) or error
                problem = [f"cannot write the checkpoint {final}: {reason}"]  # type: ignore[list-item]
        if self.group is not None:
            dist.broadcast_object_list(problem, src=0, group=self.group)
        if problem[0]:
            raise DataError(problem[0])


def _make(temporary: Path) -> None:
    if temporary.exists():
        shutil.rmtree(temporary)  # of a save that was killed
    temporary.mkdir(parents=True)


def _publish(temporary: Path, final: Path, state: dict[str, Any]) -> None:
    """Complete the files of all ranks with ``state.json`` and give them their name."""
    sizes = {path.name: path.stat().st_size for path in sorted(temporary.iterdir())}
    write_json(temporary / STATE, {"format": FORMAT, **state, "files": sizes})
    _sync(temporary)
    os.rename(temporary, final)
    _sync(final.parent)


def _sync(folder: Path) -> None:
    """Make the names in ``folder`` durable, not only the files' contents."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def complete(run_dir: str | Path) -> list[Path]:
    """The run's whole checkpoints, oldest first."""
    folder = Path(run_dir) / FOLDER
    found = [p for p in folder.iterdir() if _NAME.fullmatch(p.name)] if folder.is_dir() else []
    return sorted((p for p in found if p.is_dir()), key=lambda p: int(p.name[5:]))


def latest(run_dir: str | Path) -> Path | None:
    """The run's last whole checkpoint, or None."""
    found = complete(run_dir)
    return found[-1] if found else None


def find(resume: str | Path, run_dir: str | Path | None) -> Path:
    """The checkpoint that ``resume`` means: "auto" (the last of ``run_dir``), a run's folder (its last) or a checkpoint's own."""
    if resume == "auto" and run_dir is None:
        raise ConfigError(
            "resume is 'auto', which means the last checkpoint of a run folder, but none is given"
        )
    folder = Path(run_dir if resume == "auto" and run_dir is not None else resume)
    if _NAME.fullmatch(folder.name) or (folder / STATE).is_file():
        return folder
    found = latest(folder)
    if found is None:
        raise DataError(
            f"{folder} holds no checkpoint to go on from: set checkpoint_every in a run that is to be resumed, or start anew without resume"
        )
    return found


def read_state(checkpoint: Path) -> dict[str, Any]:
    """The checkpoint's ``state.json``, after a look at every file that it lists; :class:`DataError` names what is damaged."""
    path = checkpoint / STATE
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise DataError(f"{checkpoint} is no whole checkpoint: {STATE} is missing") from None
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise DataError(f"{path} is not a checkpoint of format {FORMAT}, the one that this version reads")
    for name, size in state["files"].items():
        file = checkpoint / name
        held = file.stat().st_size if file.is_file() else None
        if held != size:
            what = "is missing" if held is None else f"has {held} bytes instead of {size}"
            raise DataError(
                f"the checkpoint {checkpoint} is damaged: {name} {what}; resume from an earlier one"
            )
    return state


def check_fits(state: dict[str, Any], checkpoint: Path, config: TrainConfig, fingerprint: str) -> None:
    """Refuse a checkpoint of another model, of other data, or of a step that ``config`` does not reach."""
    if config.parallel.data_parallel == "fsdp":
        raise ConfigError(
            f"ParallelConfig.data_parallel is 'fsdp', a baseline that cannot go on from the checkpoint {checkpoint}: use data_parallel=ddp"
        )
    stored, wanted = flatten(state["config"]), flatten(to_dict(config))
    for name in dict.fromkeys([*wanted, *stored]):
        model = name == "model" or (name.startswith("model.") and name.removeprefix("model.") not in FREE)
        if (model or name in POSITION) and stored.get(name) != wanted.get(name):
            why = "the model must stay the same" if model else "this says where in the data the run goes on"
            raise ConfigError(
                f"{name} is {wanted.get(name)!r}, but {stored.get(name)!r} in the checkpoint {checkpoint}: {why}"
            )
    if state["data"] != fingerprint:
        raise DataError(
            f"the training data has fingerprint {fingerprint}, but the checkpoint {checkpoint} was trained on {state['data']}: "
            "resume with the same token folder"
        )
    if state["step"] > config.steps or (state["step"] == config.steps and _finished(checkpoint)):
        raise ConfigError(
            f"the checkpoint {checkpoint} is at step {state['step']}, so with steps={config.steps} nothing is left to train: raise steps"
        )


def _finished(checkpoint: Path) -> bool:
    """Whether the run that wrote ``checkpoint`` came to its end, its model written too."""
    record = checkpoint.parent.parent / "record.json"
    return not record.is_file() or RunRecord(record.parent).read()["status"] == "done"


def restore(checkpoint: Path, model: nn.Module, engine: ShardedDataParallel) -> None:
    """Fill the engine's state and the model's buffers from ``checkpoint``, and remake the weights. All ranks together."""
    from moe_lab.parallel import chunks

    group = dist.new_group(backend="gloo", timeout=LIMIT) if world()[1] > 1 else None
    try:
        chunks.load(pieces(model, engine), checkpoint, group)
    except DataError as error:
        raise DataError(f"cannot read the checkpoint {checkpoint}: {error}") from error
    engine.publish()


def belongs_to(checkpoint: Path, run_dir: str | Path) -> bool:
    """Whether ``checkpoint`` is one of the run in ``run_dir``, which then goes on in its own folder."""
    return checkpoint.resolve().parent == (Path(run_dir) / FOLDER).resolve()


def reopen(run_dir: str | Path, checkpoint: Path, step: int, **fields: Any) -> RunRecord:
    """The record of a run that goes on in its own folder from ``step``.

    Rows of later steps are dropped from ``metrics.jsonl``, so that each step is there once; later checkpoints are put
    aside as ``abandoned-step-...``, so that they are not taken for this run's last.
    """
    record = RunRecord.open(run_dir)
    resumed = [*(record.read().get("resumed") or []), resumed_entry(checkpoint, step)]
    rows = [row for row in read_metrics(record.folder / "metrics.jsonl") if row["step"] <= step]
    temporary = record.folder / ".metrics.jsonl.tmp"
    try:
        temporary.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), "utf-8")
        os.replace(temporary, record.folder / "metrics.jsonl")
        for later in complete(run_dir):
            if int(later.name[5:]) > step:
                aside = later.with_name(f"abandoned-{later.name}")
                if aside.exists():
                    shutil.rmtree(aside)
                os.rename(later, aside)
    except OSError as error:
        raise DataError(f"cannot write the run folder {run_dir}: {error.strerror or error}") from error
    record.update(status="running", finished=None, seconds=None, error=None, resumed=resumed, **fields)
    return record


def resumed_entry(checkpoint: Path, step: int) -> dict[str, Any]:
    """What a record says of a resumption."""
    return {"from": str(checkpoint), "step": step, "time": utc_now()}
