"""A folder that appears whole or not at all. Lesson: 08_full_stack."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from moe_lab.errors import DataError


@contextlib.contextmanager
def new_folder(out: str | Path) -> Iterator[Path]:
    """A temporary folder beside ``out`` to write into; it becomes ``out`` at the end, and is removed on any error.

    :class:`DataError` if ``out`` is there already and not an empty folder, or if writing fails.
    """
    out = Path(out)
    try:
        if out.is_symlink() or (out.exists() and (not out.is_dir() or any(out.iterdir()))):
            raise DataError(
                f"{out} is there already and is not an empty folder: choose another, nothing is overwritten"
            )
        out.parent.mkdir(parents=True, exist_ok=True)
        temporary = out.parent / f".{out.name}.{os.urandom(4).hex()}"
        temporary.mkdir()
    except OSError as error:
        raise DataError(f"cannot write to {out}: {error.strerror or error}") from error
    try:
        yield temporary
        os.replace(temporary, out)
    except OSError as error:
        raise DataError(f"cannot write to {out}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
