"""Data: text to token files, and token files to batches whose order is a pure function of (seed, position).

>>> from moe_lab.data import Batches, cached
>>> folder = cached("data/kjv.txt")  # prepared at the first call
>>> inputs, labels = Batches(folder, "train", sequence_length=128, seed=0).batch(first_sequence=0, count=16)

:func:`prepare` makes a folder from your own files, :func:`cached` makes and finds one, :class:`TokenFolder` opens it,
:class:`Batches` and :func:`val_batches` read it, :func:`ngram_loss` is a count model to beat. Used from lesson
00_start_here on.
"""

from moe_lab.data.cache import cached
from moe_lab.data.dataset import IGNORE_INDEX, Batches, val_batches
from moe_lab.data.folder import TokenFolder, load_tokenizer, token_dtype
from moe_lab.data.ngram import ngram_loss
from moe_lab.data.prepare import prepare
from moe_lab.data.tokenizer import BpeTokenizer, ByteTokenizer, Tokenizer

__all__ = [
    "IGNORE_INDEX",
    "Batches",
    "BpeTokenizer",
    "ByteTokenizer",
    "TokenFolder",
    "Tokenizer",
    "cached",
    "load_tokenizer",
    "ngram_loss",
    "prepare",
    "token_dtype",
    "val_batches",
]
