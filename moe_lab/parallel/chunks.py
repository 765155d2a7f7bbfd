"""Pieces of flat arrays to and from a folder, through ``torch.distributed.checkpoint``, at any layout.

The optimizer cuts flat buckets, so what a rank holds of a parameter is any range of its flattened elements. Each such
:class:`~moe_lab.parallel.buckets.Piece` is stored as a chunk of a one-dimensional global array with its offset. A reader
asks for the ranges that it needs, and torch's planner intersects them with the chunks that exist: saved over 4 ranks,
read over 1, or the other way round, without a gather. What several ranks hold alike is written once. Imported where it
is used, since torch's checkpoint package takes most of a second to load. Report, section 12. Lesson: 04_data_parallel.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Size, Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from moe_lab.errors import DataError
from moe_lab.parallel.buckets import Piece
from moe_lab.parallel.ranks import world

# One process is a normal case here, not one to warn of at each save.
warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)


def save(pieces: Iterable[Piece], folder: Path, group: dist.ProcessGroup | None) -> None:
    """Write this rank's ``pieces`` into ``folder``; returns when every rank of ``group`` has written and synced its own.

    :class:`DataError` on every rank if one of them could not write, naming it and the reason.
    """
    try:
        dcp_save(
            {piece.key: piece for piece in pieces}, storage_writer=FileSystemWriter(folder),
            planner=_SavePlanner(), process_group=group, no_dist=world()[1] == 1,
        )  # fmt: skip
    except CheckpointException as error:
        raise DataError(_sentence(error, "write")) from error


def load(pieces: Iterable[Piece], folder: Path, group: dist.ProcessGroup | None) -> None:
    """Fill this rank's ``pieces`` from ``folder``; :class:`DataError` on every rank if one cannot read what it needs."""
    try:
        dcp_load(
            {piece.key: piece for piece in pieces}, storage_reader=FileSystemReader(folder),
            planner=_LoadPlanner(), process_group=group, no_dist=world()[1] == 1,
        )  # fmt: skip
    except CheckpointException as error:
        raise DataError(_sentence(error, "read")) from error


def _sentence(error: CheckpointException, verb: str) -> str:
    rank, (cause, _) = min(error.failures.items(), key=lambda item: item[0])
    if isinstance(cause, OSError) and cause.strerror:
        reason = cause.strerror
    else:
        reason = (str(cause).splitlines() or [""])[0][:200] or type(cause).__name__
    return f"rank {rank} could not {verb} its part: {reason}"


def _chunk(piece: Piece) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=Size([piece.offset]), sizes=piece.data.shape)


class _SavePlanner(DefaultSavePlanner):
    """Torch's planner over a dict of pieces; it drops what another rank writes already."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def create_local_plan(self) -> SavePlan:
        """One item a piece: where it lies in its global array."""
        items = []
        for key, piece in self.state_dict.items():
            data = TensorWriteData(
                chunk=_chunk(piece),
                properties=TensorProperties.create_from_tensor(piece.data),
                size=Size([piece.size]),
            )
            index = MetadataIndex(key, Size([piece.offset]))
            items.append(WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=data))
        self.plan = SavePlan(items)
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        """The piece's elements."""
        return self.state_dict[index.fqn].data


class _LoadPlanner(DefaultLoadPlanner):
    """Torch's planner over a dict of pieces, each filled in place."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Keep what the plan is made from."""
        self.state_dict, self.metadata, self.is_coordinator = state_dict, metadata, is_coordinator

    def create_local_plan(self) -> LoadPlan:
        """The ranges of stored chunks that cover each piece; refuses one that they do not cover."""
        assert self.metadata is not None
        items = []
        for key, piece in self.state_dict.items():
            stored = self.metadata.state_dict_metadata.get(key)
            if not isinstance(stored, TensorStorageMetadata) or stored.size != Size([piece.size]):
                held = list(stored.size) if isinstance(stored, TensorStorageMetadata) else "nothing"
                raise ValueError(f"{key} needs {piece.size} elements, but the checkpoint holds {held}")
            parts = create_read_items_for_chunk_list(key, stored, [_chunk(piece)])
            if sum(part.lengths[0] for part in parts) != piece.data.numel():
                raise ValueError(f"the checkpoint lacks a part of {key}")
            items += parts
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """The piece's elements."""
        return self.state_dict[index.fqn].data
