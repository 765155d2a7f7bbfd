"""Hugging Face checkpoints into our model, or into a folder of ours, a tensor at a time. Lesson: 08_full_stack."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_lab.config import ModelConfig
from moe_lab.errors import ConfigError, DataError
from moe_lab.fields import to_dict
from moe_lab.interop.families import Family, family_of
from moe_lab.interop.folder import new_folder
from moe_lab.interop.options import model_config
from moe_lab.interop.tensors import Alternatives, Piece, layout, zeros
from moe_lab.model import Transformer, build
from moe_lab.records import write_json
from moe_lab.train.tensor_files import SINGLE, TensorFiles, write_file

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class Checkpoint:
    """A Hugging Face checkpoint, opened and checked whole: every tensor there, in its shape, and none besides.

    ``family``, ``config``: what it is; ``dtype``: the type its embedding is stored in; ``pieces``: for each of our
    parameters the tensors on disk that make it up. A context manager, since it holds files open.

    Raises :class:`DataError` for files that are missing, damaged, pickled, or do not fit their ``config.json``, and
    :class:`ConfigError` for an unknown architecture or an option that is not computed here.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        values = read_hf_config(self.folder)
        self.family: Family = family_of(values)
        try:
            self.config: ModelConfig = model_config(values)
        except ConfigError as error:
            raise ConfigError(f"{self.folder}: {error}") from None
        self.files = TensorFiles(self.folder)
        self.pieces = {
            name: self._stored(alternatives)
            for name, alternatives in layout(self.family, self.config).items()
        }
        self._check()
        self.dtype = self.files.entries[self.pieces["embedding.weight"][0].name].dtype

    def _stored(self, alternatives: Alternatives) -> list[Piece]:
        names = self.files.entries
        return next((a for a in alternatives if all(p.name in names for p in a)), alternatives[0])

    def _check(self) -> None:
        entries = self.files.entries
        wanted = [piece for pieces in self.pieces.values() for piece in pieces]
        missing = [piece.name for piece in wanted if piece.name not in entries]
        if missing:
            raise DataError(
                f"{self.folder} lacks {len(missing)} of the {len(wanted)} tensors of its {self.family.name} model, "
                f"{missing[0]} first"
            )
        unused = zeros(self.family, self.config)
        known = {piece.name for piece in [*wanted, *unused]}
        unknown = [n for n in entries if n not in known and not self._harmless(n)]
        if unknown:
            raise DataError(
                f"{self.folder} has {len(unknown)} tensors that its {self.family.name} model has no place for, "
                f"{unknown[0]} first"
            )
        for piece in wanted:
            entry = entries[piece.name]
            if entry.shape != piece.shape:
                raise DataError(
                    f"{self.folder} has {piece.name} of shape {list(entry.shape)}, but its config.json makes it "
                    f"{list(piece.shape)}"
                )
            if entry.dtype not in FLOATS:
                raise DataError(
                    f"{self.folder} has {piece.name} as {entry.dtype}, but weights must be floating-point: convert it first"
                )

    def _harmless(self, name: str) -> bool:
        if name.endswith("rotary_emb.inv_freq"):  # a table that old versions of transformers stored
            return True
        if name != "lm_head.weight" or not self.config.tie_embeddings:
            return False
        table, head = self.files.entries["model.embed_tokens.weight"], self.files.entries[name]
        if table.shape == head.shape and torch.equal(
            self.files.read(name), self.files.read("model.embed_tokens.weight")
        ):
            return True
        raise DataError(
            f"{self.folder} has an lm_head.weight unlike its embeddings, but config.json has tie_word_embeddings = true: "
            "set it to false"
        )

    def values(self, name: str) -> Iterator[Tensor]:
        """The elements of our parameter ``name``, flat, one stored tensor after the other."""
        for piece in self.pieces[name]:
            yield self.files.read(piece.name)

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *exception: object) -> None:
        self.files.close()


def read_hf_config(folder: Path) -> dict[str, Any]:
    """The ``config.json`` of a Hugging Face checkpoint; :class:`DataError` if it is missing or is none."""
    path = folder / "config.json"
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        raise DataError(
            f"{folder} {what}: give the folder of a Hugging Face checkpoint, with config.json and safetensors"
        )
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DataError(f"{folder} is no Hugging Face checkpoint: config.json is missing") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise DataError(f"{path} is not JSON: {error}") from None
    if not isinstance(values, dict):
        raise DataError(
            f"{path} is no model's configuration: it holds a {type(values).__name__}, not an object"
        )
    if "model_type" not in values and "d_model" in values:
        raise DataError(f"{folder} holds a model of moe_lab already: load it with moe_lab.train.load_model")
    return values


def stored_type(name: str, dtype: torch.dtype) -> torch.dtype:
    """The type of our parameter ``name`` in a model of type ``dtype``.

    A selection bias stays in fp32 at least: it moves by steps that bf16 would round away.
    """
    return torch.promote_types(dtype, torch.float32) if name.endswith(".selection_bias") else dtype


@torch.no_grad()
def load_pretrained(
    folder: str | Path, *, dtype: torch.dtype | None = None, device: str | torch.device = "cpu"
) -> Transformer:
    """The model of a Hugging Face checkpoint (OLMoE, Mixtral, Qwen3-MoE, FlexOlmo, AFMoE), for evaluation.

    Its tensors are read one at a time into the model. ``dtype``: type of the weights, by default the one they are stored
    in. Raises as :class:`Checkpoint` does, before any memory is taken.
    """
    with Checkpoint(folder) as checkpoint:
        dtype = dtype or checkpoint.dtype
        model = build(checkpoint.config, "meta")
        weights = {
            name: torch.empty(tensor.shape, dtype=stored_type(name, dtype), device=device)
            for name, tensor in model.state_dict().items()
        }
        for name, weight in weights.items():
            flat, start = weight.view(-1), 0
            for value in checkpoint.values(name):
                flat[start : start + value.numel()].copy_(value)
                start += value.numel()
    model.load_state_dict(weights, assign=True)
    return model.eval()


def import_checkpoint(folder: str | Path, out: str | Path) -> Path:
    """Write a Hugging Face checkpoint as a folder of ours, which ``moe_lab.train.load_model`` reads; returns it.

    ``out`` must be new or empty; it appears whole or not at all. One stored tensor is in memory at a time. Types stay as
    stored. Raises as :class:`Checkpoint` does, before anything is written.
    """
    with Checkpoint(folder) as checkpoint, new_folder(out) as temporary:
        state = build(checkpoint.config, "meta").state_dict()
        tensors = {n: (stored_type(n, checkpoint.dtype), tuple(t.shape)) for n, t in state.items()}
        values = (value.to(dtype) for n, (dtype, _) in tensors.items() for value in checkpoint.values(n))
        write_file(temporary / SINGLE, tensors, values)
        write_json(temporary / "config.json", to_dict(checkpoint.config))
    return Path(out)
