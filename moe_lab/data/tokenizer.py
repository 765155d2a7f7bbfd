"""Text to token ids and back: bytes as tokens, or byte-level BPE trained on the user's own files.

Both kinds have an end-of-document token, ``eod``, that no text can produce: byte 0 for :class:`ByteTokenizer` (text with
NUL is refused), a special token for :class:`BpeTokenizer` (its spelling inside a text is tokenized like any other text).

Used by lesson 00_start_here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer as HuggingFaceTokenizer
from tokenizers import decoders, models, pre_tokenizers, trainers

from moe_lab.errors import ConfigError, DataError

TOKENIZER_FILE = "tokenizer.json"
END_OF_DOCUMENT = "<|endoftext|>"
# Names under which published tokenizers hold the token that ends a document, the surest first.
_KNOWN_ENDS = (END_OF_DOCUMENT, "<|end_of_text|>", "</s>", "<eos>", "[EOS]")
_SMALLEST_BPE = 257  # 256 bytes and the end-of-document token
_LARGEST_BPE = 1 << 20

Ids = npt.NDArray[np.int64]


class Tokenizer(Protocol):
    """What the rest of moe_lab needs of a tokenizer."""

    @property
    def name(self) -> str:
        """``byte`` or ``bpe``."""

    @property
    def vocab_size(self) -> int:
        """Every id is below this."""

    @property
    def eod(self) -> int:
        """The id that ends a document."""

    def encode(self, text: str) -> Ids:
        """The ids [n] of ``text``, without ``eod``."""

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """:meth:`encode` of each text, on several cores where the tokenizer can."""

    def decode(self, ids: npt.ArrayLike) -> str:
        """The text of ``ids`` [n]: ``eod`` gives nothing, bytes that are not UTF-8 and ids out of range give U+FFFD."""


class ByteTokenizer:
    """The UTF-8 bytes of the text are its tokens: vocabulary 256, and id 0, which no text holds, ends a document."""

    name = "byte"
    vocab_size = 256
    eod = 0

    def encode(self, text: str) -> Ids:
        """Ids [n] of ``text``; :class:`DataError` if it holds NUL or half a surrogate pair."""
        try:
            data = text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise DataError(
                f"the text has half a surrogate pair at character {error.start}: remove it"
            ) from None
        if b"\0" in data:
            raise DataError(
                f"the text has a NUL byte at byte {data.find(0)}, which marks the end of a document: remove it"
            )
        return np.frombuffer(data, np.uint8).astype(np.int64)

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """:meth:`encode` of each text."""
        return [self.encode(text) for text in texts]

    def decode(self, ids: npt.ArrayLike) -> str:
        """The text of ``ids`` [n]; see :class:`Tokenizer`."""
        values = np.asarray(ids).reshape(-1)
        values = np.where(
            (values >= 0) & (values < 256), values, 0xFF
        )  # 0xFF is in no UTF-8 text, so it becomes U+FFFD
        return values[values != self.eod].astype(np.uint8).tobytes().decode("utf-8", errors="replace")

    def __repr__(self) -> str:
        return "ByteTokenizer(vocab_size=256, eod=0)"


class BpeTokenizer:
    """A Hugging Face ``tokenizers`` tokenizer; :meth:`train` makes a byte-level BPE, :meth:`load` reads any.

    ``eod_token`` is the special token that ends a document. Without it the file has to hold one of the usual names.
    """

    name = "bpe"

    def __init__(self, backend: HuggingFaceTokenizer, eod_token: str | None = None) -> None:
        special = {
            token.content: id_ for id_, token in backend.get_added_tokens_decoder().items() if token.special
        }
        known = [end for end in _KNOWN_ENDS if end in special]
        end = eod_token if eod_token is not None else known[0] if known else None
        if end not in special:
            names = ", ".join(list(special)[:8]) or "none"
            raise ConfigError(
                f"eod_token must be one of the tokenizer's special tokens ({names}), but got {end!r}: say which one ends a document"
            )
        # A document that spells a special token must not be able to end itself.
        backend.encode_special_tokens = True
        self.backend = backend
        self.eod_token: str = end
        self.eod: int = special[end]
        self.vocab_size: int = max(backend.get_vocab(with_added_tokens=True).values()) + 1

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> BpeTokenizer:
        """Train byte-level BPE on ``texts``; the same texts in the same order give the same tokenizer.

        Every byte is a token from the start, so any text can be encoded. If the text has too few different pairs, the
        vocabulary stays below ``vocab_size``. Raises :class:`ConfigError` if ``vocab_size`` is out of range.

        Source: Sennrich et al., "Neural Machine Translation of Rare Words with Subword Units" (2016), over bytes.
        """
        check_bpe_size(vocab_size)
        backend = HuggingFaceTokenizer(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[END_OF_DOCUMENT],
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        )
        backend.train_from_iterator(texts, trainer)
        return cls(backend, END_OF_DOCUMENT)

    @classmethod
    def load(cls, path: str | Path, eod_token: str | None = None) -> BpeTokenizer:
        """The tokenizer in a ``tokenizer.json``, or in a folder that holds one.

        Raises :class:`DataError` if it cannot be read and :class:`ConfigError` if its end-of-document token is not clear.
        """
        path = Path(path)
        path = path / TOKENIZER_FILE if path.is_dir() else path
        try:
            backend = HuggingFaceTokenizer.from_str(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise DataError(f"cannot read the tokenizer {path}: {error.strerror or error}") from error
        except Exception as error:  # the library raises bare Exception for a file that it cannot parse
            raise DataError(
                f"{path} is not a tokenizer.json of the tokenizers library: {str(error)[:200]}"
            ) from None
        return cls(backend, eod_token)

    def save(self, path: str | Path) -> None:
        """Write ``tokenizer.json`` into the folder ``path``, or to ``path`` if it is not a folder."""
        path = Path(path)
        path = path / TOKENIZER_FILE if path.is_dir() else path
        path.write_text(self.backend.to_str(pretty=True), encoding="utf-8")

    def encode(self, text: str) -> Ids:
        """Ids [n] of ``text``, without ``eod``; :class:`DataError` if it holds half a surrogate pair."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """:meth:`encode` of each text, on all cores."""
        try:
            encodings = self.backend.encode_batch_fast(list(texts), add_special_tokens=False)
        except TypeError:
            raise DataError(
                "the text has half a surrogate pair, which UTF-8 cannot hold: remove it"
            ) from None
        return [np.asarray(encoding.ids, np.int64) for encoding in encodings]

    def decode(self, ids: npt.ArrayLike) -> str:
        """The text of ``ids`` [n]; see :class:`Tokenizer`."""
        values = np.asarray(ids).reshape(-1)
        bad = np.flatnonzero((values < 0) | (values >= self.vocab_size))
        runs = np.split(values, bad)
        parts = [
            runs[0],
            *(run[1:] for run in runs[1:]),
        ]  # each later run begins with the id that is out of range
        return "\ufffd".join(self.backend.decode(part.tolist(), skip_special_tokens=True) for part in parts)

    def __repr__(self) -> str:
        return f"BpeTokenizer(vocab_size={self.vocab_size}, eod={self.eod})"


def check_bpe_size(vocab_size: Any) -> None:
    """:class:`ConfigError` unless ``vocab_size`` is an integer that a byte-level BPE can have."""
    if (
        isinstance(vocab_size, bool)
        or not isinstance(vocab_size, int)
        or not _SMALLEST_BPE <= vocab_size <= _LARGEST_BPE
    ):
        raise ConfigError(
            f"vocab_size of a BPE tokenizer must be an integer from {_SMALLEST_BPE} (256 bytes and the end of a document) "
            f"to {_LARGEST_BPE}, but got {vocab_size!r}"
        )
