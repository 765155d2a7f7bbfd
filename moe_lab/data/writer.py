"""Token files while they are written: documents tokenized in groups, and the split into training and validation.

Used by lesson 00_start_here through :func:`moe_lab.data.prepare`.
"""

from __future__ import annotations

import hashlib
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np

from moe_lab.data.files import Source
from moe_lab.data.folder import token_dtype
from moe_lab.data.text import read_pieces
from moe_lab.data.tokenizer import ByteTokenizer, Ids, Tokenizer

_GROUP = 1 << 22  # characters tokenized in one call, and
_GROUP_PIECES = 1 << 15  # pieces, each of which may be as short as one character
_COPY = 1 << 20  # tokens moved at a time


def _grouped(pieces: Iterable[tuple[str, bool]]) -> Iterator[list[tuple[str, bool]]]:
    group: list[tuple[str, bool]] = []
    size = 0
    for piece in pieces:
        group.append(piece)
        size += len(piece[0])
        if size >= _GROUP or len(group) >= _GROUP_PIECES:
            yield group
            group, size = [], 0
    if group:
        yield group


class SplitWriter:
    """Writes ``train.bin`` and ``val.bin``.

    Where a document goes is known only at its end, from its length or its hash. So each is written to the training file
    first, and what belongs to validation is moved from that file's end.
    """

    def __init__(self, folder: Path, tokenizer: Tokenizer, val_fraction: float, rule: str) -> None:
        self.folder, self.tokenizer, self.val_fraction, self.rule = folder, tokenizer, val_fraction, rule
        self.dtype = token_dtype(tokenizer.vocab_size)
        self.counts = {split: {"tokens": 0, "documents": 0, "text_bytes": 0} for split in ("train", "val")}
        self.files: dict[str, BinaryIO] = {}

    def __enter__(self) -> SplitWriter:
        self.files = {
            split: open(self.folder / f"{split}.bin", "w+b")  # noqa: SIM115 (closed by __exit__)
            for split in self.counts
        }
        return self

    def __exit__(self, *error: object) -> None:
        for file in self.files.values():
            with file:
                if error[0] is None:
                    file.flush()
                    os.fsync(file.fileno())

    def write_all(self, sources: Sequence[Source], log: Callable[[str], None]) -> None:
        """Write every document of ``sources``."""
        read, next_line = 0, time.monotonic() + 5
        tokens = text_bytes = 0  # of the document being written
        digest = hashlib.blake2b()
        # One stream over all sources, so that many small files are tokenized together.
        stream = (item for source in sources for item in read_pieces(source))
        for group in _grouped(stream):
            for (piece, ends), ids in zip(group, self.tokenizer.encode_batch([piece for piece, _ in group])):
                data = piece.encode("utf-8")
                digest.update(data)
                self._append("train", ids)
                tokens, text_bytes, read = tokens + len(ids), text_bytes + len(data), read + len(data)
                if ends:
                    self._finish(tokens, text_bytes, digest.digest())
                    tokens, text_bytes, digest = 0, 0, hashlib.blake2b()
            if time.monotonic() >= next_line:
                next_line = time.monotonic() + 5
                done = sum(split["tokens"] for split in self.counts.values())
                log(f"tokenized {read / 1e6:.0f} MB of text, {done / 1e6:.1f} M tokens")

    def _append(self, split: str, ids: Ids) -> None:
        self.files[split].write(ids.astype(self.dtype).tobytes())
        self.counts[split]["tokens"] += len(ids)

    def _finish(self, tokens: int, text_bytes: int, digest: bytes) -> None:
        """End the document of the last ``tokens`` training tokens, and move its validation part."""
        if not tokens:  # a tokenizer read from a file may drop all of a text
            return
        if self.rule == "documents":
            chosen = int.from_bytes(digest[:8], "big") < self.val_fraction * 2.0**64
            moved = tokens if chosen else 0
        else:
            moved = math.floor(tokens * self.val_fraction)
        moved_bytes = self._move(moved) if moved else 0
        moved_bytes = text_bytes if moved == tokens else min(moved_bytes, text_bytes)
        for split, part, part_bytes in (
            ("train", tokens - moved, text_bytes - moved_bytes),
            ("val", moved, moved_bytes),
        ):
            if part:
                self._append(split, np.asarray([self.tokenizer.eod]))
                self.counts[split]["documents"] += 1
                self.counts[split]["text_bytes"] += part_bytes

    def _move(self, tokens: int) -> int:
        """Move the last ``tokens`` of training to validation; returns the UTF-8 bytes that they stand for.

        A token of BPE can hold part of a character, so the count can be off by the few bytes of the character cut.
        """
        train, width = self.files["train"], self.dtype.itemsize
        start = self.counts["train"]["tokens"] - tokens
        text_bytes = 0
        for first in range(start, start + tokens, _COPY):
            train.seek(first * width)
            ids = np.frombuffer(train.read(min(_COPY, start + tokens - first) * width), self.dtype)
            is_byte = isinstance(self.tokenizer, ByteTokenizer)
            text_bytes += len(ids) if is_byte else len(self.tokenizer.decode(ids).encode("utf-8"))
            self._append("val", ids.astype(np.int64))
        train.seek(start * width)
        train.truncate()
        self.counts["train"]["tokens"] = start
        return text_bytes
