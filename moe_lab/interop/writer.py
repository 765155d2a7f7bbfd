"""Our models as Hugging Face checkpoints, which ``transformers`` loads, a tensor at a time. Lesson: 08_full_stack."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from moe_lab.config import ModelConfig
from moe_lab.interop.folder import new_folder
from moe_lab.interop.options import choose, hf_config
from moe_lab.interop.tensors import layout, zeros
from moe_lab.model import Transformer, build
from moe_lab.records import write_json
from moe_lab.train.store import open_weights, read_config
from moe_lab.train.tensor_files import INDEX, SINGLE, TensorFiles, write_file

SHARD_BYTES = 5 * 10**9
MAX_POSITIONS = 4096


class Weights(Protocol):
    """Where our parameters come from: a module or a folder."""

    def dtype(self, name: str) -> torch.dtype:
        """Type of a parameter."""
        ...

    def read(self, name: str, start: int, count: int) -> Tensor:
        """``count`` elements from ``start`` on, flat."""
        ...


class ModuleWeights:
    """The weights of a model in memory."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.state = model.state_dict()

    def dtype(self, name: str) -> torch.dtype:
        """Type of a parameter."""
        return self.state[name].dtype

    def read(self, name: str, start: int, count: int) -> Tensor:
        """``count`` elements from ``start`` on, flat; a view where the parameter is contiguous."""
        return self.state[name].reshape(-1)[start : start + count]


class FolderWeights:
    """The weights of one of our folders."""

    def __init__(self, files: TensorFiles) -> None:
        self.files = files

    def dtype(self, name: str) -> torch.dtype:
        """Type of a parameter."""
        return self.files.entries[name].dtype

    def read(self, name: str, start: int, count: int) -> Tensor:
        """``count`` elements from ``start`` on, flat."""
        return self.files.read(name, start, count)


@dataclass(frozen=True)
class Part:
    """One tensor to write: its name on disk, shape and type, and where its elements are in our parameter ``ours``.

    ``ours`` None: zeros.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    ours: str | None
    start: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


def save_pretrained(
    model: Transformer,
    folder: str | Path,
    architecture: str | None = None,
    *,
    max_shard_bytes: int = SHARD_BYTES,
    max_positions: int = MAX_POSITIONS,
) -> Path:
    """Write ``model`` as a Hugging Face checkpoint that ``transformers`` loads with the same logits; returns ``folder``.

    ``architecture``: "olmoe", "mixtral", "qwen3_moe", "flex_olmo" or "afmoe"; None takes the first that can express the
    model. ``folder`` must be new or empty; it appears whole or not at all. Files hold up to ``max_shard_bytes`` each.
    ``max_positions``: what ``max_position_embeddings`` says; RoPE itself has no limit. Options of training (weights of
    auxiliary losses other than the balance loss, init seed) are not part of such a checkpoint.

    Raises :class:`ConfigError` naming each option that the architecture cannot express.
    """
    return _write(model.config, ModuleWeights(model), folder, architecture, max_shard_bytes, max_positions)


def export_checkpoint(
    source: str | Path,
    out: str | Path,
    architecture: str | None = None,
    *,
    max_shard_bytes: int = SHARD_BYTES,
    max_positions: int = MAX_POSITIONS,
) -> Path:
    """:func:`save_pretrained` for a model in one of our folders; one tensor is in memory at a time."""
    config = read_config(source)
    with open_weights(source, build(config, "meta")) as files:
        return _write(config, FolderWeights(files), out, architecture, max_shard_bytes, max_positions)


def _write(
    config: ModelConfig,
    weights: Weights,
    out: str | Path,
    architecture: str | None,
    max_shard_bytes: int,
    max_positions: int,
) -> Path:
    family = choose(config, architecture)
    values = hf_config(family, config, max_positions)
    dtype = weights.dtype("embedding.weight")
    values["dtype"] = str(dtype).removeprefix("torch.")
    parts = []
    for ours, alternatives in layout(family, config).items():
        start = 0
        for piece in alternatives[0]:
            parts.append(Part(piece.name, piece.shape, weights.dtype(ours), ours, start))
            start += piece.numel
    for piece in zeros(family, config):
        kind = torch.float32 if piece.name.endswith("expert_bias") else dtype
        parts.append(Part(piece.name, piece.shape, kind, None, 0))
    shards = _shards(parts, max_shard_bytes)
    names = [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
    if len(shards) == 1:
        names = [SINGLE]
    with new_folder(out) as folder:
        for name, shard in zip(names, shards):
            write_file(folder / name, {p.name: (p.dtype, p.shape) for p in shard}, _values(weights, shard))
        if len(shards) > 1:
            write_json(folder / INDEX, _index(names, shards))
        write_json(folder / "config.json", values)
    return Path(out)


def _values(weights: Weights, parts: list[Part]) -> Iterator[Tensor]:
    for part in parts:
        if part.ours is None:
            yield torch.zeros(part.shape, dtype=part.dtype)
        else:
            yield weights.read(part.ours, part.start, part.numel)


def _shards(parts: list[Part], max_bytes: int) -> list[list[Part]]:
    """``parts`` in order, cut where a file would grow over ``max_bytes``; a larger tensor has a file of its own."""
    shards: list[list[Part]] = [[]]
    filled = 0
    for part in parts:
        size = part.numel * part.dtype.itemsize
        if shards[-1] and filled + size > max_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(part)
        filled += size
    return shards


def _index(names: list[str], shards: list[list[Part]]) -> dict[str, Any]:
    total = sum(part.numel * part.dtype.itemsize for shard in shards for part in shard)
    weight_map = {part.name: name for name, shard in zip(names, shards) for part in shard}
    return {"metadata": {"total_size": total}, "weight_map": weight_map}
