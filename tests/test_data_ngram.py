"""The count model against a direct one, and on the shipped text."""

from __future__ import annotations

import math
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_lab.data import ngram_loss, prepare
from moe_lab.errors import ConfigError, DataError

KJV = Path(__file__).parents[1] / "data/kjv.txt"


def probability(train: list[int], context: list[int], token: int, vocab_size: int) -> float:
    """Witten-Bell by its definition, counting anew for every call."""
    if context:
        shorter = probability(train, context[1:], token, vocab_size)
    else:
        shorter = 1 / vocab_size
    n = len(context)
    followers = Counter(train[i + n] for i in range(len(train) - n) if train[i : i + n] == context)
    if not followers:
        return probability(train, context[1:], token, vocab_size)
    return (followers[token] + len(followers) * shorter) / (sum(followers.values()) + len(followers))


tokens = st.lists(st.integers(0, 4), min_size=1, max_size=30)


@settings(deadline=None)
@given(train=tokens, val=tokens, order=st.integers(1, 5))
def test_equals_the_definition(train: list[int], val: list[int], order: int) -> None:
    losses = [
        -math.log(probability(train, val[max(0, i - order + 1) : i], val[i], 6)) for i in range(len(val))
    ]
    assert ngram_loss(train, val, 6, order) == pytest.approx(sum(losses) / len(losses), rel=1e-12)


@settings(deadline=None)
@given(train=tokens, context=st.lists(st.integers(0, 4), min_size=2, max_size=2))
def test_sums_to_one_over_the_vocabulary(train: list[int], context: list[int]) -> None:
    assert sum(probability(train, context, token, 6) for token in range(6)) == pytest.approx(1)


def test_large_vocabulary_takes_the_sorting_path() -> None:
    rng = np.random.default_rng(0)
    small = rng.integers(0, 50, 4000)
    scattered = rng.permutation(1_000_000)[:50]
    for order in (2, 3, 4):
        expected = ngram_loss(small[:3000], small[3000:], 1_000_000, order)
        assert ngram_loss(
            scattered[small[:3000]], scattered[small[3000:]], 1_000_000, order
        ) == pytest.approx(expected, rel=1e-12)


def test_known_sources() -> None:
    rng = np.random.default_rng(0)
    uniform = rng.integers(0, 16, 200_000)
    assert ngram_loss(uniform[:190_000], uniform[190_000:], 16, 1) == pytest.approx(math.log(16), abs=0.01)
    cycle = np.arange(10_000) % 7
    assert ngram_loss(cycle[:9000], cycle[9000:], 256, 3) < 0.05
    assert ngram_loss(cycle[:9000], cycle[9000:], 256, 1) == pytest.approx(math.log(7), abs=0.01)


def test_king_james(tmp_path: Path) -> None:
    folder = prepare([KJV], tmp_path / "out")
    started = time.perf_counter()
    losses = [ngram_loss(folder.tokens("train"), folder.tokens("val"), 256, order) for order in (1, 2, 3)]
    assert time.perf_counter() - started < 6  # for all three
    assert losses == pytest.approx([3.034554, 2.341040, 1.800108], abs=1e-6)


def test_bad_arguments() -> None:
    for train, val, word in (
        ([], [1], "training"),
        ([1], [], "validation"),
        ([1, 9], [1], "id 9"),
        ([1], [-1], "id -1"),
    ):
        with pytest.raises(DataError, match=word):
            ngram_loss(train, val, 9)
    with pytest.raises(ConfigError, match="order"):
        ngram_loss([1], [1], 9, 0)
