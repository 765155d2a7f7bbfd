"""A model as two files: ``config.json`` and ``model.safetensors``. Lesson: 00_start_here.

Written and read a tensor at a time, so that a model needs no second copy of itself in memory.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from pathlib import Path

import torch

from moe_lab.config import ModelConfig, TrainConfig
from moe_lab.errors import ConfigError, DataError
from moe_lab.fields import flatten, from_dict, to_dict
from moe_lab.model import Transformer, build
from moe_lab.records import write_json
from moe_lab.train.tensor_files import SINGLE, TensorFiles, write_file

# Options that neither shape a parameter nor change what the model computes from its weights; a run that goes on from a
# stored model may set them anew.
FREE = frozenset(
    {"init_std", "init_seed", "moe.balance_loss", "moe.balance_scope", "moe.router_z_loss", "moe.assignment"}
)


def save_model(model: Transformer, folder: str | Path, state: dict[str, torch.Tensor] | None = None) -> Path:
    """Write the weights and the model's configuration into ``folder``; readers see whole files only.

    ``state``: the whole weights, where ``model`` holds only a share of them.
    """
    folder = Path(folder)
    temporary = folder / f".{SINGLE}.tmp"
    state = model.state_dict() if state is None else state
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_file(temporary, {n: (t.dtype, tuple(t.shape)) for n, t in state.items()}, state.values())
        os.replace(temporary, folder / SINGLE)
        write_json(folder / "config.json", to_dict(model.config))
    except OSError as error:
        raise DataError(f"cannot write the model to {folder}: {error.strerror or error}") from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()
    return folder


def read_config(folder: str | Path) -> ModelConfig:
    """The configuration of a stored model; :class:`DataError` if there is none, or if it is another program's."""
    path = Path(folder) / "config.json"
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise DataError(f"{folder} holds no model: config.json is missing") from None
    except (OSError, ValueError) as error:
        raise DataError(f"the model in {folder} cannot be read: {error}") from error
    if isinstance(values, dict) and "model_type" in values:
        raise DataError(f"{folder} holds a Hugging Face checkpoint: import it first, with moe-lab import")
    if not isinstance(values, dict):
        raise DataError(f"{path} is not a model's configuration: it holds no JSON object")
    try:
        return from_dict(ModelConfig, values)
    except ConfigError as error:
        raise DataError(f"the model in {folder} cannot be read: {error}") from error


def open_weights(folder: str | Path, model: torch.nn.Module) -> TensorFiles:
    """The weights in ``folder``, checked name by name and shape by shape against ``model`` (which may be on "meta")."""
    expected = model.state_dict()
    files = TensorFiles(folder)
    unlike = sorted(set(expected) ^ set(files.entries))
    if unlike:
        raise DataError(
            f"the weights in {folder} do not fit their configuration: {unlike[0]} is on one side only"
        )
    for name, tensor in expected.items():
        if files.entries[name].shape != tuple(tensor.shape):
            raise DataError(
                f"the weights in {folder} do not fit their configuration: {name} has shape "
                f"{list(files.entries[name].shape)}, but {list(tensor.shape)} is needed"
            )
    return files


def load_model(folder: str | Path, device: str | torch.device = "cpu") -> Transformer:
    """The model that :func:`save_model` wrote, in its types; :class:`DataError` if files are missing or do not fit."""
    model = build(read_config(folder), "meta")
    with open_weights(folder, model) as files:
        weights = {
            name: files.read(name).view(tensor.shape).to(device)
            for name, tensor in model.state_dict().items()
        }
    model.load_state_dict(weights, assign=True)
    return model.eval()


@torch.no_grad()
def load_weights(model: Transformer, folder: str | Path) -> None:
    """Fill ``model`` with the weights stored in ``folder``, converted to its types: how training goes on from them.

    :class:`ConfigError` names the first option in which the two configurations differ, those in :data:`FREE` aside.
    """
    stored, wanted = flatten(to_dict(read_config(folder))), flatten(to_dict(model.config))
    for name in dict.fromkeys([*wanted, *stored]):
        if name not in FREE and stored.get(name) != wanted.get(name):
            raise ConfigError(
                f"ModelConfig.{name} is {wanted.get(name)!r}, but {stored.get(name)!r} in the initial model {folder}"
            )
    with open_weights(folder, model) as files:
        for name, tensor in model.state_dict().items():
            tensor.copy_(files.read(name).view(tensor.shape))


def with_initial_model(config: TrainConfig, folder: str | Path) -> TrainConfig:
    """``config`` going on from the model stored in ``folder``: its model configuration and ``initial_model`` set."""
    return dataclasses.replace(config, model=read_config(folder), initial_model=str(folder))
