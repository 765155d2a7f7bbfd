"""Batches: a pure function of (seed, position), each sample once an epoch, labels one token on."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_lab.data import IGNORE_INDEX, Batches, TokenFolder, val_batches
from moe_lab.data.dataset import permute
from moe_lab.errors import ConfigError, DataError


def make(
    path: Path, train: np.ndarray, val: np.ndarray | None = None, vocab_size: int = 1 << 32
) -> TokenFolder:
    path.mkdir(parents=True, exist_ok=True)
    splits = {}
    for name, tokens in (("train", train), ("val", val)):
        if tokens is not None:
            tokens.astype("<u4").tofile(path / f"{name}.bin")
            splits[name] = {"file": f"{name}.bin", "tokens": len(tokens)}
    info = {"schema": 1, "dtype": "uint32", "vocab_size": vocab_size, "eod": 0, "splits": splits}
    (path / "tokens.json").write_text(json.dumps(info))
    return TokenFolder.open(path)


@pytest.fixture(scope="module")
def counting(tmp_path_factory) -> TokenFolder:
    """Token i is i + 1, so that a token says where it lies and none is the end of a document."""
    return make(tmp_path_factory.mktemp("data") / "t", np.arange(1, 1005), np.arange(1, 104))


def test_permutations_of_every_small_size() -> None:
    for size in range(1, 300):
        for epoch in range(3):
            assert np.array_equal(np.sort(permute(np.arange(size), size, 7, epoch)), np.arange(size))


@settings(deadline=None)
@given(size=st.integers(1, 1 << 40), seed=st.integers(), epoch=st.integers(0, 1 << 70), data=st.data())
def test_permutation_of_a_slice_is_that_slice_of_the_permutation(
    size: int, seed: int, epoch: int, data: st.DataObject
) -> None:
    positions = np.asarray(data.draw(st.lists(st.integers(0, size - 1), unique=True, max_size=8)), np.int64)
    out = permute(positions, size, seed, epoch)
    assert len(set(out.tolist())) == len(positions)
    assert all(0 <= o < size for o in out)
    assert [
        int(permute(positions[i : i + 1], size, seed, epoch)[0]) for i in range(len(positions))
    ] == out.tolist()


def test_the_order_is_pinned() -> None:
    """A resumed run needs the order of the version that started it."""
    pinned = [
        [4, 6, 9, 2, 1, 8, 5, 3, 0, 7],
        [6, 8, 7, 9, 0, 3, 2, 4, 5, 1],
        [7974746, 725590970, 125621128, 479054858, 83638901, 920445646, 888593866, 140819897],
    ]
    assert permute(np.arange(10), 10, 0, 0).tolist() == pinned[0]
    assert permute(np.arange(10), 10, 0, 1).tolist() == pinned[1]
    assert permute(np.arange(8), 10**9, 34521, 3).tolist() == pinned[2]


def test_shuffles_are_random_enough() -> None:
    size = 10_000
    orders = np.stack(
        [permute(np.arange(size), size, seed, epoch) for seed in range(4) for epoch in range(4)]
    ).astype(float)
    correlations = np.corrcoef(np.concatenate([orders, np.arange(size)[None]]))
    np.fill_diagonal(correlations, 0)
    assert np.abs(correlations).max() < 0.05  # of 136 pairs, at a standard deviation of 0.01
    steps = np.diff(orders, axis=1)
    assert len(np.unique(steps)) > size  # neighbours are not a fixed step apart
    # Each sample falls anywhere with equal odds: chi-square of one sample's place over many seeds, 9 degrees of freedom.
    places = np.asarray([int(permute(np.asarray([3]), 10, seed, 0)[0]) for seed in range(5000)])
    counts = np.bincount(places, minlength=10)
    assert ((counts - 500) ** 2 / 500).sum() < 30


def test_samples_and_labels(counting: TokenFolder) -> None:
    batches = Batches(counting, "train", 10, seed=3)
    assert batches.samples == 100  # 1004 tokens: 100 samples of 10 need 1001
    inputs, labels = batches.batch(0, 100)
    assert inputs.dtype == labels.dtype == torch.int64
    assert inputs.shape == labels.shape == (100, 10)
    assert inputs.is_contiguous()
    assert labels.is_contiguous()
    assert torch.equal(labels, inputs + 1)
    assert torch.equal(inputs.sort(0).values.flatten(), torch.arange(1, 1001))
    assert not torch.equal(inputs.flatten(), torch.arange(1, 1001))
    plain, _ = Batches(counting, "train", 10, shuffle=False).batch(0, 100)
    assert torch.equal(plain.flatten(), torch.arange(1, 1001))


def test_epochs_differ_and_each_holds_every_sample(counting: TokenFolder) -> None:
    batches = Batches(counting, "train", 10, seed=3)
    epochs = [batches.batch(100 * e, 100)[0] for e in range(3)]
    assert not torch.equal(epochs[0], epochs[1])
    assert all(torch.equal(e.sort(0).values, epochs[0].sort(0).values) for e in epochs)
    assert not torch.equal(epochs[0], Batches(counting, "train", 10, seed=4).batch(0, 100)[0])


@settings(max_examples=60, deadline=None)
@given(
    first=st.integers(0, 500),
    counts=st.lists(st.integers(0, 250), min_size=1, max_size=4),
    far=st.sampled_from([0, 10**15, 10**25]),
)
def test_a_batch_is_its_slices_wherever_they_are_cut(
    counting: TokenFolder, first: int, counts: list[int], far: int
) -> None:
    first += far
    whole = Batches(counting, "train", 10, seed=1, documents=True).batch(first, sum(counts))
    parts, at = [], first
    for count in counts:
        parts.append(Batches(counting, "train", 10, seed=1, documents=True).batch(at, count))
        at += count
    for field, expected in enumerate(whole):
        assert torch.equal(torch.cat([part[field] for part in parts]), expected)


def test_ranks_share_a_step(counting: TokenFolder) -> None:
    """4 ranks with 2 microbatches of 3 sequences read what one rank reads at once, also across the end of an epoch."""
    batches = Batches(counting, "train", 10, seed=9)
    whole, _ = batches.batch(90, 24)
    parts = [batches.batch(90 + (rank * 2 + micro) * 3, 3)[0] for rank in range(4) for micro in range(2)]
    assert torch.equal(torch.cat(parts), whole)


def test_too_long_or_wrong_lengths(counting: TokenFolder, tmp_path: Path) -> None:
    assert Batches(counting, "train", 1003).samples == 1
    with pytest.raises(DataError) as caught:
        Batches(counting, "train", 1004)
    assert "1004" in str(caught.value)
    assert "1005" in str(caught.value)
    with pytest.raises(DataError, match="val split"):
        Batches(counting, "val", 500)
    with pytest.raises(DataError, match="holds 0"):
        Batches(make(tmp_path, np.arange(9), np.arange(0)), "val", 1)
    for length in (0, -5):
        with pytest.raises(ConfigError, match=str(length)):
            Batches(counting, "train", length)
    with pytest.raises(ConfigError, match="-1"):
        Batches(counting, "train", 10).batch(-1, 2)


def test_documents(tmp_path: Path) -> None:
    tokens = np.asarray([5, 6, 0, 7, 0, 0, 8, 9, 4, 0, 3])
    inputs, labels, ids = Batches(make(tmp_path, tokens), "train", 5, documents=True, shuffle=False).batch(
        0, 2
    )
    assert inputs.tolist() == [[5, 6, 0, 7, 0], [0, 8, 9, 4, 0]]
    assert ids.dtype == torch.int32
    assert ids.tolist() == [[0, 0, 0, 1, 1], [0, 1, 1, 1, 1]]
    # The token after an end of document belongs to the next one: nothing in the sequence can predict it.
    assert labels.tolist() == [[6, 0, IGNORE_INDEX, 0, IGNORE_INDEX], [IGNORE_INDEX, 9, 4, 0, IGNORE_INDEX]]
    _, unmasked = Batches(make(tmp_path, tokens), "train", 5, shuffle=False).batch(0, 2)
    assert unmasked.tolist() == [[6, 0, 7, 0, 0], [8, 9, 4, 0, 3]]


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("limit", [None, 1, 7, 10, 99])
def test_validation_is_the_same_for_any_number_of_ranks(
    counting: TokenFolder, limit: int | None, documents: bool
) -> None:
    expected = None
    for ranks, size in ((1, 1), (1, 4), (3, 2), (4, 16)):
        by_rank = [
            list(val_batches(counting, 10, size, limit=limit, rank=rank, ranks=ranks, documents=documents))
            for rank in range(ranks)
        ]
        assert (
            len({len(batches) for batches in by_rank}) == 1
        )  # a rank that stopped early would leave the others waiting
        rows = []
        for step in range(len(by_rank[0])):
            for batches in by_rank:
                inputs, labels = batches[step][:2]
                assert inputs.shape == labels.shape == (size, 10)
                assert len(batches[step]) == 2 + documents
                padding = (labels == IGNORE_INDEX).all(1)
                assert torch.equal(labels[~padding], inputs[~padding] + 1)
                assert (inputs[padding] == 0).all()
                rows += inputs[~padding].tolist()
        expected = expected or rows
        assert rows == expected
    assert expected is not None
    assert len(expected) == min(limit or 10, 10)  # 103 tokens hold 10 samples
    assert [row[0] for row in expected] == sorted(row[0] for row in expected)


def test_limited_validation_is_spread_over_the_split(counting: TokenFolder) -> None:
    (batch,) = val_batches(counting, 10, 5, limit=5)
    assert batch[0][:, 0].tolist() == [1, 21, 41, 61, 81]


def test_validation_settings(counting: TokenFolder) -> None:
    for arguments in (
        {"batch_size": 0},
        {"batch_size": 1, "limit": 0},
        {"batch_size": 1, "rank": 2, "ranks": 2},
    ):
        with pytest.raises(ConfigError):
            val_batches(counting, 10, **arguments)
    with pytest.raises(DataError, match="104"):
        val_batches(counting, 103, 1)  # at once, not at the first batch
