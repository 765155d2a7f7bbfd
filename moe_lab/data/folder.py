"""A folder of token files: ``train.bin``, ``val.bin`` and the side file ``tokens.json`` that says what they are.

The ``.bin`` files are plain little-endian arrays of uint16 (vocabularies up to 65,536) or uint32, without a header, the
format that Olmo-core reads; the end-of-document token follows each document. Files made elsewhere can be used by writing
a ``tokens.json`` beside them; the fields marked * are enough.

``tokens.json``, schema 1:

=================  ====================================================================================================
``schema`` *       1
``moe_lab``        version that wrote it
``dtype`` *        ``uint16`` or ``uint32``, always little-endian
``vocab_size`` *   every id is below it
``eod`` *          id of the end-of-document token
``tokenizer``      ``{"name": "byte" or "bpe", "file": null or "tokenizer.json", "eod_token": null or its spelling}``
``splits`` *       by name (``train`` *, ``val``): ``{"file" *, "tokens" *, "documents", "text_bytes"}``; ``text_bytes`` counts
                   the UTF-8 text that the tokens stand for, so that a loss a token becomes one a byte
``val_fraction``   the share asked for
``split``          ``{"rule": "documents", "tails" or "none", "description": ...}``: how the validation tokens were chosen
``sources``        each file read: ``{"path", "bytes", "sha256", "documents"}``, in order
=================  ====================================================================================================

Used by lesson 00_start_here.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from moe_lab.data.files import SIDE_FILE
from moe_lab.data.tokenizer import BpeTokenizer, ByteTokenizer, Tokenizer
from moe_lab.errors import ConfigError, DataError

SCHEMA = 1
CHECK_LIMIT = (
    100_000_000  # tokens; a larger folder has its ids checked batch by batch instead of when it is opened
)
_CHECK_CHUNK = 1 << 24  # tokens compared at a time

Tokens = npt.NDArray[np.unsignedinteger[Any]]

# (file, bytes, time of change, vocabulary) of token files whose ids were all checked by this process.
_checked: set[tuple[str, int, int, int]] = set()


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """The smallest token type for a vocabulary: uint16 up to 65,536 ids, else uint32; little-endian."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


@dataclass(frozen=True)
class TokenFolder:
    """An opened folder of token files; :meth:`open` checks it. Holds no file open, so it can be sent to other processes.

    ``path``: the folder; ``dtype``: token type on disk; ``vocab_size``: every id is below it; ``eod``: end-of-document
    id; ``info``: the whole ``tokens.json``.
    """

    path: Path
    dtype: np.dtype[Any]
    vocab_size: int
    eod: int
    info: dict[str, Any] = field(repr=False, hash=False)

    @classmethod
    def open(cls, path: str | Path) -> TokenFolder:
        """Open and check the folder ``path``.

        Raises :class:`DataError` if there is no side file or it contradicts itself, if a token file is missing, ends in
        mid-token or has another length than stated, and, up to ``CHECK_LIMIT`` tokens, if an id is not below
        ``vocab_size``. Larger files have their ids checked as they are read.
        """
        path = Path(path)
        side_file = path / SIDE_FILE
        if not side_file.is_file():
            found = (
                "holds no tokens.json"
                if path.is_dir()
                else "is not a folder"
                if path.exists()
                else "does not exist"
            )
            raise DataError(
                f"{path} {found}: prepare text with moe-lab data prepare, which writes the folder and its side file"
            )
        info = read_json(side_file)
        if not isinstance(info, dict) or info.get("schema") != SCHEMA:
            found = repr(info.get("schema")) if isinstance(info, dict) else f"a {type(info).__name__}"
            raise DataError(
                f"{side_file} has schema {found[:80]}, but this version reads {SCHEMA}: prepare the data again"
            )
        if info.get("dtype") not in ("uint16", "uint32"):
            raise DataError(
                f"{side_file}: dtype must be uint16 or uint32, but it is {_short(info.get('dtype'))}"
            )
        dtype = np.dtype(info["dtype"]).newbyteorder("<")
        vocab_size = _integer(side_file, "vocab_size", info.get("vocab_size"), 1, 256**dtype.itemsize)
        eod = _integer(side_file, "eod", info.get("eod"), 0, vocab_size - 1)
        folder = cls(path, dtype, vocab_size, eod, info)
        splits = info.get("splits")
        if not isinstance(splits, dict) or "train" not in splits:
            raise DataError(f"{side_file} has no train split under 'splits': prepare the data again")
        for split in splits:
            folder._check(split, splits[split])
        return folder

    def _check(self, split: str, entry: Any) -> None:
        side_file = self.path / SIDE_FILE
        name = entry.get("file") if isinstance(entry, dict) else None
        if not _is_plain_name(name):
            raise DataError(
                f"{side_file}: split {split!r} must name a file inside the folder, but it has {_short(name)}"
            )
        stated = _integer(side_file, f"tokens of split {split!r}", entry.get("tokens"), 0, 1 << 62)
        file = self.path / str(name)
        try:
            status = file.stat()
        except OSError as error:
            raise DataError(
                f"cannot read {file}, which {SIDE_FILE} names: {error.strerror or error}"
            ) from error
        width = self.dtype.itemsize
        if status.st_size % width:
            raise DataError(
                f"{file} is truncated in mid-token: {status.st_size} bytes are no multiple of the {width} of a {self.dtype.name}"
            )
        if status.st_size != stated * width:
            raise DataError(
                f"{file} holds {status.st_size // width} tokens, but {SIDE_FILE} says {stated}: it is truncated or not the file described"
            )
        key = (str(file.resolve()), status.st_size, status.st_mtime_ns, self.vocab_size)
        if stated > CHECK_LIMIT or self.vocab_size == 256**width or key in _checked:
            return
        self.check_ids(self.tokens(split), split)
        _checked.add(key)

    def check_ids(self, tokens: npt.NDArray[Any], split: str, first: int = 0) -> None:
        """:class:`DataError` if one of ``tokens`` [n], which begin at position ``first`` of ``split``, is not in the vocabulary."""
        for start in range(0, len(tokens), _CHECK_CHUNK):
            chunk = tokens[start : start + _CHECK_CHUNK]
            if chunk.max() >= self.vocab_size:
                at = int(np.argmax(chunk >= self.vocab_size))
                raise DataError(
                    f"{self.path / self.info['splits'][split]['file']}: token {first + start + at} has id {int(chunk[at])}, but the "
                    f"vocabulary has {self.vocab_size} ids: the file was made with another tokenizer or is damaged"
                )

    def tokens(self, split: str) -> Tokens:
        """The tokens [n] of ``split`` (``train`` or ``val``), memory-mapped and read-only; :class:`DataError` if there is no such split."""
        splits = self.info["splits"]
        if split not in splits:
            raise DataError(f"{self.path} has no split {split!r}: it has {', '.join(splits)}")
        if not splits[split]["tokens"]:
            return np.empty(0, self.dtype)  # an empty file cannot be mapped
        file = self.path / splits[split]["file"]
        try:
            return np.memmap(file, self.dtype, mode="r")
        except (OSError, ValueError) as error:
            raise DataError(f"cannot map {file}: {getattr(error, 'strerror', None) or error}") from error

    def count(self, split: str) -> int:
        """The number of tokens in ``split``, 0 if there is no such split."""
        return int(self.info["splits"].get(split, {}).get("tokens", 0))

    def tokenizer(self) -> Tokenizer:
        """The tokenizer that made the tokens; :class:`DataError` if the side file names none or another vocabulary."""
        value = self.info.get("tokenizer")
        described: dict[str, Any] = value if isinstance(value, dict) else {}
        name, file, eod_token = (described.get(key) for key in ("name", "file", "eod_token"))
        if name == "byte":
            tokenizer: Tokenizer = ByteTokenizer()
        elif name == "bpe" and _is_plain_name(file):
            try:
                tokenizer = BpeTokenizer.load(
                    self.path / str(file), str(eod_token) if eod_token is not None else None
                )
            except ConfigError as error:
                raise DataError(f"{self.path / SIDE_FILE} does not fit its tokenizer: {error}") from error
        else:
            raise DataError(
                f"{self.path / SIDE_FILE} names no tokenizer that this version knows, so its tokens cannot be shown as text"
            )
        if (tokenizer.vocab_size, tokenizer.eod) != (self.vocab_size, self.eod):
            raise DataError(
                f"{self.path / SIDE_FILE} says vocab_size {self.vocab_size} and eod {self.eod}, but its {name} tokenizer has "
                f"{tokenizer.vocab_size} and {tokenizer.eod}: prepare the data again"
            )
        return tokenizer

    @property
    def fingerprint(self) -> str:
        """A hash of what the tokens are (sources, tokenizer, split), wherever the folder lies; a resumed run compares it."""
        sources = self.info.get("sources")
        hashes = (
            [s.get("sha256") for s in sources if isinstance(s, dict)] if isinstance(sources, list) else None
        )
        what = [
            self.dtype.name,
            self.vocab_size,
            self.eod,
            self.info["splits"],
            self.info.get("tokenizer"),
            self.info.get("split"),
            hashes,
        ]
        return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:16]


def load_tokenizer(folder_or_name: str | Path) -> Tokenizer:
    """The tokenizer called ``byte``, or that of a prepared folder, or the one in a ``tokenizer.json``.

    Raises :class:`DataError` if there is none.
    """
    if str(folder_or_name) == ByteTokenizer.name:
        return ByteTokenizer()
    path = Path(folder_or_name)
    if (path / SIDE_FILE).is_file():
        return TokenFolder.open(path).tokenizer()
    if not path.exists():
        raise DataError(
            f"there is no tokenizer {str(folder_or_name)!r}: give 'byte', a prepared folder or a tokenizer.json"
        )
    return BpeTokenizer.load(path)


def read_json(path: Path, limit: int = 1 << 28) -> Any:
    """The JSON value in ``path``; :class:`DataError` if it cannot be read, is above ``limit`` bytes, or is not JSON."""
    try:
        size = path.stat().st_size
        if size > limit:
            raise DataError(
                f"{path} has {size} bytes, more than the {limit} that such a file can have: it is damaged"
            )
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{path} is not JSON ({str(error)[:100]}): it is damaged, prepare the data again"
        ) from None


def _is_plain_name(name: Any) -> bool:
    """Whether ``name`` is a file in the folder itself: a side file must not reach anywhere else."""
    return (
        isinstance(name, str)
        and name not in ("", ".", "..")
        and not set(name) & set("/\\\0")
        and len(name) < 256
    )


def _integer(file: Path, name: str, value: Any, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise DataError(f"{file}: {name} must be an integer from {low} to {high}, but it is {_short(value)}")
    return value


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
