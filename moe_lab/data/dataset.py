"""Sequences of tokens in an order that is a pure function of (seed, position).

A split of N tokens holds ``(N - 1) // S`` samples of sequence length S. Sample i is ``tokens[i*S : i*S + S + 1]``: its first S
tokens are the inputs, its last S the labels, so each label is the token after its input, across document boundaries too.
Every epoch visits each sample once, in an order of its own. Nothing is remembered between calls: a run resumes exactly
from the number of sequences consumed so far, and any rank can read any slice of any batch.

Shapes: B sequences in a batch, S sequence length. Used by lesson 00_start_here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from moe_lab.data.folder import TokenFolder, Tokens
from moe_lab.errors import ConfigError, DataError

IGNORE_INDEX = -100  # a label that counts in no loss, torch's default for cross_entropy
_ROUNDS = 6
_MASK = (1 << 64) - 1

_U64 = npt.NDArray[np.uint64]


def _mix(x: _U64) -> _U64:
    """The output function of SplitMix64 (Steele et al., "Fast splittable pseudorandom number generators", 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def permute(positions: npt.NDArray[np.int64], size: int, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    """Where ``positions`` [n], each in 0 .. size-1, go in the permutation of ``size`` that (seed, epoch) names.

    A Feistel network over the next even power of two, walked on until the value falls below ``size``. So nothing of
    the size of the data is stored, and, unlike NumPy's own shuffles, the order cannot change with NumPy's version.

    Source: Black and Rogaway, "Ciphers with arbitrary finite domains" (2002), cycle walking.
    """
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    bits, low = np.uint64(half), np.uint64((1 << half) - 1)
    # Seed, epoch and round are mixed one after the other: adding them up would let (seed, epoch + 1) equal (seed + 1, epoch).
    key = _mix(np.asarray([seed & _MASK], np.uint64))
    key = _mix(key ^ np.asarray([epoch & _MASK], np.uint64))
    keys = _mix(key + np.arange(1, _ROUNDS + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15))
    out = positions.astype(np.uint64)
    outside = np.arange(len(out))
    while len(outside):
        x = out[outside]
        left, right = x >> bits, x & low
        for round_key in keys:
            left, right = right, left ^ (_mix(right + round_key) & low)
        out[outside] = (left << bits) | right
        outside = outside[out[outside] >= np.uint64(size)]
    return out.astype(np.int64)


class Batches:
    """The samples of one split in shuffled order, epoch after epoch.

    ``samples``: samples in an epoch. ``documents=True`` is for document-bounded attention: batches then also say which
    document each token belongs to, and the label of each end-of-document token, which is the first token of the next,
    unrelated document, becomes ``IGNORE_INDEX``. ``shuffle=False`` keeps the order of the file.

    Raises :class:`ConfigError` for a length below 1 and :class:`DataError` if the split does not hold one sample.
    """

    def __init__(
        self,
        folder: TokenFolder,
        split: str,
        sequence_length: int,
        seed: int = 0,
        *,
        documents: bool = False,
        shuffle: bool = True,
    ) -> None:
        if sequence_length < 1:
            raise ConfigError(f"sequence_length must be at least 1, but got {sequence_length}")
        self.folder, self.split, self.sequence_length, self.seed = folder, split, sequence_length, seed
        self.documents, self.shuffle = documents, shuffle
        self.tokens: Tokens = folder.tokens(split)
        self.samples = (len(self.tokens) - 1) // sequence_length
        if self.samples < 1:
            raise DataError(
                f"sequence length {sequence_length} needs {sequence_length + 1} tokens, but the {split} split of {folder.path} "
                f"holds {len(self.tokens)}: shorten the sequences or prepare more text"
            )

    def batch(self, first_sequence: int, count: int) -> tuple[torch.Tensor, ...]:
        """Sequences ``first_sequence`` to ``first_sequence + count - 1``, counted since the start of training over all ranks.

        Returns (inputs [count, S] int64, labels [count, S] int64), and with ``documents`` also the document ids
        [count, S] int32: 0 for the sequence's first document, one more after each end-of-document token, which itself
        belongs to the document that it ends. A batch may straddle epochs.

        Raises :class:`DataError` if a token is not in the vocabulary.
        """
        if first_sequence < 0 or count < 0:
            raise ConfigError(
                f"a batch needs first_sequence and count of at least 0, but got {first_sequence} and {count}"
            )
        epoch, offset = divmod(first_sequence, self.samples)
        parts = []
        while count > 0:
            here = min(count, self.samples - offset)
            positions = np.arange(offset, offset + here)
            parts.append(permute(positions, self.samples, self.seed, epoch) if self.shuffle else positions)
            epoch, offset, count = epoch + 1, 0, count - here
        return self._read(np.concatenate(parts) if parts else np.empty(0, np.int64))

    def _read(self, samples: npt.NDArray[np.int64], padded: int = 0) -> tuple[torch.Tensor, ...]:
        """The given samples, then ``padded`` rows of end-of-document tokens whose labels are all ignored."""
        length = self.sequence_length
        rows: npt.NDArray[Any] = np.full((len(samples) + padded, length + 1), self.folder.eod, np.int64)
        for row, sample in zip(rows, samples):
            start = int(sample) * length
            row[:] = self.tokens[start : start + length + 1]
            # The files are checked when opened, but only up to a size, and they can change afterwards; this costs microseconds.
            if row.max() >= self.folder.vocab_size:
                self.folder.check_ids(row, self.split, start)
        data = torch.from_numpy(rows)
        inputs, labels = data[:, :-1].contiguous(), data[:, 1:].contiguous()
        labels[len(samples) :] = IGNORE_INDEX
        if not self.documents:
            return inputs, labels
        ends = inputs == self.folder.eod
        labels[ends] = IGNORE_INDEX
        ids = ends.cumsum(1) - ends.long()
        return inputs, labels, ids.int()


def val_batches(
    folder: TokenFolder,
    sequence_length: int,
    batch_size: int,
    *,
    split: str = "val",
    limit: int | None = None,
    rank: int = 0,
    ranks: int = 1,
    documents: bool = False,
) -> Iterator[tuple[torch.Tensor, ...]]:
    """The samples of the validation split in the order of the file, ``batch_size`` at a time on each of ``ranks``.

    ``limit`` takes that many samples, spread evenly over the split. Each batch is what :meth:`Batches.batch` returns and
    always has ``batch_size`` rows: at the end, rows whose labels are all ``IGNORE_INDEX`` fill it up, so every rank makes
    the same number of steps, and the sums of loss and of labels over all ranks do not depend on their number. Tokens
    after the last whole sample are left out.

    Raises as :class:`Batches` does, and :class:`ConfigError` for sizes below 1 or a rank out of range.
    """
    if batch_size < 1 or (limit is not None and limit < 1) or not 0 <= rank < ranks:
        raise ConfigError(
            f"validation needs batch_size and limit of at least 1 and a rank below ranks, but got batch_size {batch_size}, "
            f"limit {limit}, rank {rank} of {ranks}"
        )
    batches = Batches(folder, split, sequence_length, documents=documents, shuffle=False)
    count = min(limit or batches.samples, batches.samples)
    samples = np.arange(count) * batches.samples // count

    def read() -> Iterator[tuple[torch.Tensor, ...]]:
        for start in range(0, count, batch_size * ranks):
            mine = samples[start + rank * batch_size :][:batch_size]
            yield batches._read(mine, padded=batch_size - len(mine))

    return read()
