"""Tensors in safetensors files, read and written a piece at a time. Lesson: 08_full_stack.

The format (``safetensors`` project, format 0.x): 8 bytes, the header's length as a little-endian integer; the header, a
JSON object of ``{name: {"dtype", "shape", "data_offsets": [begin, end]}}`` and an optional ``__metadata__``; then the
data, row-major and little-endian, without gaps. A folder holds ``model.safetensors``, or several files and
``model.safetensors.index.json`` with ``{"weight_map": {name: file}}``.

Reading and writing here go through plain file calls: a tensor, or a range of one, is in memory only while it is used.
Memory maps would grow the process by the whole file, and the library's writer takes all tensors at once.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from moe_lab.errors import DataError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
NAMES = {dtype: name for name, dtype in DTYPES.items()}
LARGEST_HEADER = 100_000_000  # bytes, the library's own limit


@dataclass(frozen=True)
class Entry:
    """Where one tensor lies: ``file``, type, shape, and its first byte in the file."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


def read_header(path: Path) -> dict[str, Entry]:
    """The tensors of one file; :class:`DataError` unless it is a whole safetensors file."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        length = int.from_bytes(start, "little")
        if len(start) < 8 or length > LARGEST_HEADER:
            if start[:4] == b"PK\x03\x04" or start[:1] == b"\x80":
                raise DataError(
                    f"{path} is a pickle, which can run code when it is loaded: save it as safetensors"
                )
            raise DataError(
                f"{path} cannot be read: it is not a safetensors file, its first 8 bytes are no header length"
            )
        text = file.read(length)
    if len(text) < length:
        raise DataError(
            f"{path} is cut short: it has {size} bytes, but its header alone takes {8 + length}: copy it again"
        )
    try:
        header = json.loads(text)
        header.pop("__metadata__", None)
        entries, spans = {}, []
        for name, value in header.items():
            begin, end = value["data_offsets"]
            if value["dtype"] not in DTYPES:
                raise DataError(
                    f"{path} holds {name} as {value['dtype']}, but {', '.join(DTYPES)} can be read: convert it first"
                )
            entry = Entry(path, DTYPES[value["dtype"]], tuple(value["shape"]), 8 + length + begin)
            if (
                begin < 0
                or min(entry.shape, default=0) < 0
                or end - begin != entry.numel * entry.dtype.itemsize
            ):
                raise ValueError(f"{name} has shape {entry.shape} in {end - begin} bytes")
            entries[name] = entry
            spans.append((begin, end))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f"{path} cannot be read: it is not a safetensors file, its header is wrong ({error})"
        ) from None
    spans.sort()
    whole = 8 + length + (spans[-1][1] if spans else 0)
    if size < whole:
        raise DataError(
            f"{path} is cut short: it has {size} bytes, but its header describes {whole}: copy it again"
        )
    if size > whole or any(a[1] != b[0] for a, b in zip([(0, 0), *spans], spans)):
        raise DataError(f"{path} is damaged: its tensors leave gaps, overlap or do not fill the {size} bytes")
    return entries


class TensorFiles:
    """The tensors of a folder with one safetensors file or several and an index; a context manager.

    ``entries``: where each tensor lies, by name. Raises :class:`DataError` in one sentence for a folder without
    safetensors (naming a pickle if that is what it holds), a shard that is missing, and a file that is damaged.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.entries: dict[str, Entry] = {}
        self._open: dict[Path, io.FileIO] = {}
        try:
            for path in self._paths():
                for name, entry in read_header(path).items():
                    if name in self.entries:
                        raise DataError(f"{name} is both in {self.entries[name].file} and in {path}")
                    self.entries[name] = entry
        except OSError as error:
            raise DataError(f"{error.filename} cannot be read: {error.strerror}") from error

    def _paths(self) -> list[Path]:
        if not self.folder.is_dir():
            what = "is a file" if self.folder.exists() else "does not exist"
            raise DataError(f"{self.folder} {what}: give the folder that holds {SINGLE} or {INDEX}")
        if (self.folder / SINGLE).exists():
            return [self.folder / SINGLE]
        if not (self.folder / INDEX).exists():
            pickles = sorted(p.name for p in self.folder.iterdir() if p.suffix in PICKLES)
            if pickles:
                raise DataError(
                    f"{self.folder} holds a pickle, {pickles[0]}, which can run code when it is loaded: save it as safetensors"
                )
            raise DataError(f"{self.folder} holds no weights: neither {SINGLE} nor {INDEX} is there")
        try:
            weight_map = json.loads((self.folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
            names = sorted(set(weight_map.values()))
            if not all(isinstance(name, str) and Path(name).name == name for name in names):
                raise ValueError("a file name in it is no plain name")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(f"{self.folder / INDEX} is not an index of safetensors files ({error})") from None
        absent = [name for name in names if not (self.folder / name).exists()]
        if absent:
            raise DataError(
                f"{self.folder} is incomplete: {len(absent)} of {len(names)} files of its index are missing, {absent[0]} first"
            )
        return [self.folder / name for name in names]

    def read(self, name: str, start: int = 0, count: int | None = None) -> Tensor:
        """``count`` elements of a tensor from element ``start`` on, flat, on the CPU; all of them without ``count``."""
        entry = self.entries[name]
        count = entry.numel - start if count is None else count
        assert 0 <= start <= start + count <= entry.numel, (name, start, count)
        values = torch.empty(count, dtype=entry.dtype)
        if count:
            try:
                file = self._open.get(entry.file) or self._open.setdefault(entry.file, io.FileIO(entry.file))
                file.seek(entry.begin + start * entry.dtype.itemsize)
                view, done = values.view(torch.uint8).numpy().data, 0
                while done < len(view):  # one call reads at most 2 GiB
                    got = file.readinto(view[done:])
                    if not got:
                        raise DataError(f"{entry.file} ended while {name} was read: it was changed meanwhile")
                    done += got
            except OSError as error:
                raise DataError(f"{entry.file} cannot be read: {error.strerror or error}") from error
        return values

    def close(self) -> None:
        """Close the files."""
        while self._open:
            self._open.popitem()[1].close()

    def __enter__(self) -> TensorFiles:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


Described = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]  # type and shape by tensor name


def write_file(path: Path, tensors: Described, values: Iterable[Tensor]) -> None:
    """Write one safetensors file: ``values`` are the tensors' elements in the order of ``tensors``.

    Each item of ``values`` is a tensor or a piece of one, of any shape, on any device; only one is held at a time.
    The caller puts the finished file in place.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape) in tensors.items():
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # data starts at a multiple of 8 bytes
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for value in values:
            flat = value.detach().contiguous().cpu().reshape(-1)
            if flat.numel():
                file.write(flat.view(torch.uint8).numpy().data)
        written = file.tell() - 8 - len(text)
    assert written == end, f"{path}: {written} bytes were written, but the header describes {end}"
