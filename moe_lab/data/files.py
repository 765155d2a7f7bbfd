"""Which files to read, and their bytes: plain, or compressed with gzip or Zstandard.

Files are read in pieces, so the memory needed depends neither on the size of a file nor on its compression ratio.

Used by lesson 00_start_here through :func:`moe_lab.data.prepare`.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import BinaryIO, Protocol, cast

from moe_lab.errors import DataError

CHUNK = 1 << 20  # bytes read at a time
# Compressed bytes decompressed at a time. A Zstandard block of four bytes can stand for 128 KiB, so the input has to be
# small for the output to be bounded (here to 32 MiB).
ZSTD_INPUT = 1 << 10
SIDE_FILE = "tokens.json"


@dataclass
class Source:
    """One file to read. ``documents``, ``bytes`` and ``sha256`` (of the file as it lies on disk) are set once it is read."""

    path: Path
    from_folder: bool = False  # found by walking a folder, not named by the caller
    documents: int = 0
    bytes: int = 0
    sha256: str = field(default="", compare=False)

    @property
    def is_jsonl(self) -> bool:
        """Whether each line is a document of its own."""
        return _suffixes(self.path)[0] == ".jsonl"


def _suffixes(path: Path) -> tuple[str, str]:
    """The suffix that says what the text is, and the one that says how it is compressed ("" for none)."""
    suffixes = [s.lower() for s in path.suffixes]
    packed = suffixes.pop() if suffixes and suffixes[-1] in (".gz", ".zst") else ""
    return (suffixes[-1] if suffixes else "", packed)


def find_sources(inputs: Sequence[str | Path], include: Sequence[str] = ()) -> list[Source]:
    """The files that ``inputs`` name, folders walked recursively in sorted order, each file once.

    Inside folders, hidden files, folders already prepared (they hold ``tokens.json``) and files whose name matches none
    of the patterns in ``include`` are left out; without patterns every file counts.

    Raises :class:`DataError` for an input that does not exist or is neither a file nor a folder, and if nothing is found.
    """
    found: dict[Path, Source] = {}
    if not inputs:
        raise DataError("no input was given: name at least one text file or folder")
    for given in map(Path, inputs):
        try:
            if given.is_dir():
                for path in _walk(given, include):
                    found.setdefault(path.resolve(), Source(path, from_folder=True))
            elif given.is_file():
                found.setdefault(given.resolve(), Source(given))
            elif given.exists():
                raise DataError(
                    f"{given} is neither a regular file nor a folder: give text files or folders of them"
                )
            else:
                raise DataError(f"{given} does not exist: check the path")
        except (
            OSError,
            ValueError,
            RuntimeError,
        ) as error:  # ValueError: a NUL in the path; RuntimeError: a link loop
            raise DataError(
                f"cannot read {str(given)!r}: {getattr(error, 'strerror', None) or error}"
            ) from error
    if not found:
        chosen = f" whose names match {', '.join(include)}" if include else ""
        raise DataError(f"{', '.join(map(str, inputs))} holds no files{chosen}: nothing to prepare")
    return list(found.values())


def _walk(folder: Path, include: Sequence[str]) -> Iterator[Path]:
    def fail(error: OSError) -> None:
        raise error

    for parent, folders, files in os.walk(folder, onerror=fail):
        if SIDE_FILE in files:
            folders.clear()
            continue
        folders[:] = sorted(f for f in folders if not f.startswith("."))
        for name in sorted(files):
            wanted = not include or any(fnmatch(name, pattern) for pattern in include)
            path = Path(parent, name)
            if wanted and not name.startswith(".") and path.is_file():
                yield path


class _HashingReader:
    """A file whose raw bytes are hashed and counted as they are read, whatever decompresses them above."""

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.digest, self.count = file, hashlib.sha256(), 0

    def read(self, size: int = -1) -> bytes:
        data = self.file.read(size)
        self.digest.update(data)
        self.count += len(data)
        return data


class _Reader(Protocol):
    def read(self, size: int = -1, /) -> bytes: ...


def _zstd_chunks(file: _Reader) -> Iterator[bytes]:
    import zstandard  # here, so that plain text needs no such package

    # decompressobj, because zstandard's stream_reader ends a truncated frame like a whole one, without an error.
    decompressor = zstandard.ZstdDecompressor()
    frame = None
    parts: list[bytes] = []
    size = 0
    while data := file.read(ZSTD_INPUT):
        while data:
            frame = frame or decompressor.decompressobj()
            try:
                parts.append(frame.decompress(data))
            except zstandard.ZstdError as error:
                raise EOFError(error) from error  # damage, told as gzip tells it
            size += len(parts[-1])
            data = b""
            if frame.eof:
                data, frame = frame.unused_data, None
        if size >= CHUNK:
            yield b"".join(parts)
            parts, size = [], 0
    yield b"".join(parts)
    if frame is not None:
        raise EOFError("the file ends before its last frame does")


def read_chunks(source: Source) -> Iterator[bytes]:
    """The decompressed bytes of ``source``, about ``CHUNK`` at a time; at the end its size and hash are set."""
    packed = _suffixes(source.path)[1]
    try:
        with open(source.path, "rb") as raw:
            reader = _HashingReader(raw)
            if packed == ".zst":
                yield from _zstd_chunks(reader)
            else:
                file = cast(
                    _Reader, gzip.GzipFile(fileobj=cast(BinaryIO, reader), mode="rb") if packed else reader
                )
                while data := file.read(CHUNK):
                    yield data
            source.bytes, source.sha256 = reader.count, reader.digest.hexdigest()
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(
            f"{source.path} cannot be decompressed ({error}): it is damaged or not a {packed} file"
        ) from error
    except OSError as error:
        raise DataError(f"cannot read {source.path}: {error.strerror or error}") from error
