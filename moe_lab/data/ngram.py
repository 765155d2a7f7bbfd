"""A count model of the next token, the baseline that a trained network has to beat.

Used by lesson 00_start_here, which draws the trigram's loss into the loss curve.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from moe_lab.errors import ConfigError, DataError


def ngram_loss(
    train_tokens: npt.ArrayLike, val_tokens: npt.ArrayLike, vocab_size: int, order: int = 3
) -> float:
    """Cross-entropy, in nats a token, of ``val_tokens`` [n] under an ``order``-gram model counted on ``train_tokens`` [m].

    Witten-Bell smoothing: with c(hw) the count of token w after context h, c(h) their sum over w, and T(h) the number of
    different tokens seen after h,

        p(w | h) = (c(hw) + T(h) p(w | h')) / (c(h) + T(h)),

    where h' is h without its oldest token; below the unigram stands the uniform distribution 1 / ``vocab_size``. It has
    nothing to tune, and sums to 1 over the vocabulary. The first ``order - 1`` tokens are predicted from what precedes them.

    Raises :class:`ConfigError` if ``order`` is below 1, :class:`DataError` for no tokens or an id out of range.

    Source: Witten and Bell, "The zero-frequency problem" (1991), in the interpolated form of Chen and Goodman (1998).
    """
    if order < 1:
        raise ConfigError(f"order of an n-gram model must be at least 1, but got {order}")
    train = _tokens("training", train_tokens, vocab_size)
    val = _tokens("validation", val_tokens, vocab_size)
    p = np.full(len(val), 1.0 / vocab_size)
    # The context of each position as a dense id; 0 is the empty context. A position whose context has not been seen in
    # training has id -1 and keeps the estimate of the shorter context.
    train_context = np.zeros(len(train), np.int64)
    val_context = np.zeros(len(val), np.int64)
    for level in range(1, order + 1):
        followed = train_context[level - 1 :] * vocab_size + train[level - 1 :]
        grams, counts = _count(followed, vocab_size)
        contexts = int(grams[-1]) // vocab_size + 1 if len(grams) else 0
        context_of_gram = grams // vocab_size
        total = np.bincount(context_of_gram, counts, contexts)  # c(h)
        distinct = np.bincount(context_of_gram, minlength=contexts)  # T(h)

        known = np.flatnonzero((val_context >= 0) & (np.arange(len(val)) >= level - 1))
        known = known[val_context[known] < contexts]
        h = val_context[known]
        gram = _find(grams, h * vocab_size + val[known])
        seen = np.where(gram >= 0, counts[gram], 0)
        smoothed = (seen + distinct[h] * p[known]) / np.maximum(total[h] + distinct[h], 1)
        p[known] = np.where(total[h] > 0, smoothed, p[known])

        if level < order:
            # The next level's context of position i is this level's gram that ends at i - 1.
            previous = np.full(len(val), -1, np.int64)
            previous[known] = gram
            val_context = np.concatenate(([-1], previous[:-1]))
            train_grams = np.zeros(len(train), np.int64)
            train_grams[level - 1 :] = _find(grams, followed)
            train_context = np.concatenate(([0], train_grams[:-1]))
    return float(-np.log(p).mean())


def _tokens(name: str, tokens: npt.ArrayLike, vocab_size: int) -> npt.NDArray[np.int64]:
    values: npt.NDArray[Any] = np.asarray(tokens).reshape(-1)
    if not len(values):
        raise DataError(f"an n-gram model needs {name} tokens, but got none")
    low, high = int(values.min()), int(values.max())
    if low < 0 or high >= vocab_size:
        raise DataError(
            f"the {name} tokens have id {low if low < 0 else high}, but the vocabulary has {vocab_size} ids"
        )
    return values.astype(np.int64)


def _count(
    keys: npt.NDArray[np.int64], vocab_size: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """The different ``keys`` in ascending order, and how often each occurs."""
    if (
        len(keys) and keys.max() < 1 << 25
    ):  # counting is many times faster than sorting while the table is small
        table = np.bincount(keys)
        grams = np.flatnonzero(table)
        return grams, table[grams]
    return np.unique(keys, return_counts=True)


def _find(sorted_keys: npt.NDArray[np.int64], keys: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The index of each key in ``sorted_keys``, -1 where it is not there."""
    if not len(sorted_keys):
        return np.full(len(keys), -1, np.int64)
    at = np.minimum(np.searchsorted(sorted_keys, keys), len(sorted_keys) - 1)
    return np.where(sorted_keys[at] == keys, at, -1)
