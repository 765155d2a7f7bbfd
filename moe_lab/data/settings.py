"""How text is to be tokenized and split: the arguments of :func:`moe_lab.data.prepare`, checked before anything is read.

Used by lesson 00_start_here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import moe_lab
from moe_lab.data.files import Source
from moe_lab.data.folder import SCHEMA
from moe_lab.data.text import read_pieces
from moe_lab.data.tokenizer import BpeTokenizer, ByteTokenizer, Tokenizer, check_bpe_size
from moe_lab.errors import ConfigError, DataError

DEFAULT_BPE_SIZE = 4096


@dataclass(frozen=True)
class Settings:
    """How to tokenize and split, checked; see :func:`prepare`."""

    tokenizer: str
    vocab_size: int | None
    tokenizer_file: Path | None
    eod_token: str | None
    val_fraction: float

    @classmethod
    def check(
        cls,
        tokenizer: str | None,
        vocab_size: int | None,
        tokenizer_file: str | Path | None,
        eod_token: str | None,
        val_fraction: float,
    ) -> Settings:
        """The settings, with what was left out filled in; :class:`ConfigError` if they contradict each other."""
        name = tokenizer if tokenizer is not None else "bpe" if tokenizer_file is not None else "byte"
        if name not in ("byte", "bpe"):
            raise ConfigError(f"tokenizer must be 'byte' or 'bpe', but got {name!r}")
        if name == "byte" and tokenizer_file is not None:
            raise ConfigError(
                f"tokenizer 'byte' reads no file, but tokenizer_file is {tokenizer_file}: use tokenizer 'bpe'"
            )
        if name == "byte" and vocab_size not in (None, ByteTokenizer.vocab_size):
            raise ConfigError(
                f"tokenizer 'byte' has 256 ids, but vocab_size is {vocab_size}: leave it out, or use tokenizer 'bpe'"
            )
        vocab_size = ByteTokenizer.vocab_size if name == "byte" else vocab_size
        if eod_token is not None and tokenizer_file is None:
            raise ConfigError("eod_token names a token of tokenizer_file, but there is no tokenizer_file")
        if name == "bpe" and tokenizer_file is None:
            vocab_size = DEFAULT_BPE_SIZE if vocab_size is None else vocab_size
            check_bpe_size(vocab_size)
        if (
            isinstance(val_fraction, bool)
            or not isinstance(val_fraction, (int, float))
            or not 0 <= val_fraction < 1
        ):
            raise ConfigError(
                f"val_fraction must be a number of at least 0 and below 1, but got {val_fraction!r}"
            )
        file = Path(tokenizer_file) if tokenizer_file is not None else None
        return cls(name, vocab_size, file, eod_token, float(val_fraction))

    def make(self, sources: Sequence[Source]) -> Tokenizer:
        """The tokenizer itself, trained on ``sources`` if it is a BPE without a file."""
        if self.tokenizer == "byte":
            return ByteTokenizer()
        if self.tokenizer_file is None:
            assert self.vocab_size is not None
            texts = (piece for source in sources for piece, _ in read_pieces(source))
            return BpeTokenizer.train(texts, self.vocab_size)
        loaded = BpeTokenizer.load(self.tokenizer_file, self.eod_token)
        if self.vocab_size not in (None, loaded.vocab_size):
            raise ConfigError(
                f"vocab_size is {self.vocab_size}, but {self.tokenizer_file} has {loaded.vocab_size}: leave vocab_size out"
            )
        return loaded


def settings_key(settings: Settings, sources: Sequence[Source]) -> str:
    """A hash of what :func:`prepare` would make of ``sources``: their contents, the settings, and the tokenizer file's."""

    def digest(path: Path) -> str:
        try:
            with open(path, "rb") as file:
                return hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise DataError(f"cannot read {path}: {error.strerror or error}") from error

    what: list[Any] = [
        SCHEMA,
        moe_lab.__version__,
        settings.tokenizer,
        settings.vocab_size,
        settings.eod_token,
        settings.val_fraction,
    ]
    what += [settings.tokenizer_file and digest(settings.tokenizer_file)]
    what += [(digest(source.path), source.is_jsonl, source.path.suffix.lower()) for source in sources]
    return hashlib.sha256(repr(what).encode()).hexdigest()[:24]
