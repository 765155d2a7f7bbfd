"""A trained model as two files: ``config.json`` and ``model.safetensors``. Lesson: 00_start_here."""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from moe_lab.config import ModelConfig
from moe_lab.errors import DataError
from moe_lab.fields import from_dict, to_dict
from moe_lab.model import Transformer, build
from moe_lab.records import write_json


def save_model(model: Transformer, folder: str | Path) -> Path:
    """Write the weights and the model's configuration into ``folder``; readers see whole files only."""
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        temporary = folder / ".model.safetensors.tmp"
        save_file({name: tensor.contiguous() for name, tensor in model.state_dict().items()}, temporary)
        os.replace(temporary, folder / "model.safetensors")
        write_json(folder / "config.json", to_dict(model.config))
    except OSError as error:
        raise DataError(f"cannot write the model to {folder}: {error.strerror or error}") from error
    return folder


def load_model(folder: str | Path, device: str | torch.device = "cpu") -> Transformer:
    """The model that :func:`save_model` wrote; :class:`DataError` if files are missing or do not fit."""
    folder = Path(folder)
    try:
        config = from_dict(ModelConfig, json.loads((folder / "config.json").read_text()))
        weights = load_file(folder / "model.safetensors", device=str(device))
    except FileNotFoundError as error:
        raise DataError(f"{folder} holds no model: {Path(error.filename or '?').name} is missing") from None
    except Exception as error:
        raise DataError(f"the model in {folder} cannot be read: {error}") from error
    model = build(config, "meta")
    missing = sorted(set(model.state_dict()) ^ set(weights))
    if missing:
        raise DataError(
            f"the weights in {folder} do not fit their configuration: {missing[0]} is on one side only"
        )
    model.load_state_dict(weights, assign=True)
    return model.eval()
