"""Prepared data that is made once and found again.

Used by every preset: ``cached("data/kjv.txt")`` is the token folder of the shipped text, made at the first call.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from moe_lab.data.files import SIDE_FILE, find_sources
from moe_lab.data.folder import TokenFolder
from moe_lab.data.prepare import prepare
from moe_lab.data.settings import Settings, settings_key
from moe_lab.errors import DataError

CACHE_VARIABLE = "MOE_LAB_CACHE"  # folder of prepared data; ~/.cache/moe_lab if it is not set


def find(source: str | Path) -> Path:
    """``source`` as a path that exists: a relative one in the working directory, else beside the package's ``data/`` folder.

    So ``data/kjv.txt`` works from anywhere if moe_lab is installed from its repository. Raises :class:`DataError` that
    names both places.
    """
    path = Path(source).expanduser() if str(source).startswith("~") else Path(source)
    root = Path(__file__).resolve().parents[2]
    places = list(dict.fromkeys([Path.cwd() / path, root / path]))  # an absolute path stays as it is
    for place in places:
        if os.path.exists(place):
            return place
    raise DataError(f"{source} does not exist: looked for {' and for '.join(map(str, places))}")


def cached(
    source: str | Path,
    *,
    tokenizer: str | None = None,
    vocab_size: int | None = None,
    tokenizer_file: str | Path | None = None,
    eod_token: str | None = None,
    val_fraction: float = 0.05,
) -> TokenFolder:
    """The token folder of ``source``: itself if it is prepared, else prepared with these settings at the first call.

    The arguments are those of :func:`moe_lab.data.prepare`, and do not apply to a prepared folder. The result lies in the
    folder that the variable ``MOE_LAB_CACHE`` names (``~/.cache/moe_lab`` without it), under a hash of content and settings;
    if that cannot be written, under the system's temporary folder. Several processes may call it at the same time: one
    prepares, the others wait for it. The hash reads the whole source at each call, so prepare large data once with
    ``moe-lab data prepare`` and pass the folder.

    Raises :class:`DataError` and :class:`ConfigError` as :func:`moe_lab.data.prepare` does.
    """
    path = find(source)
    if (path / SIDE_FILE).is_file() or (path / "train.bin").is_file():
        return TokenFolder.open(path)
    settings = Settings.check(tokenizer, vocab_size, tokenizer_file, eod_token, val_fraction)
    key = settings_key(settings, find_sources([path]))
    for parent in _parents():  # also one that cannot be written any more may hold it
        if (parent / key / SIDE_FILE).is_file():
            return _reopen(parent / key)
    parent = _writable_parent()
    with _locked(parent / f".{key}.lock"):
        if (parent / key / SIDE_FILE).is_file():
            return _reopen(parent / key)
        try:
            return prepare(
                [path],
                parent / key,
                tokenizer=settings.tokenizer,
                vocab_size=vocab_size,
                tokenizer_file=tokenizer_file,
                eod_token=eod_token,
                val_fraction=val_fraction,
            )
        except DataError:
            # Where locks do not work (some network file systems) another process may have been faster.
            if (parent / key / SIDE_FILE).is_file():
                return _reopen(parent / key)
            raise


def _reopen(folder: Path) -> TokenFolder:
    try:
        return TokenFolder.open(folder)
    except DataError as error:
        raise DataError(f"{error} (this is a cached copy: remove {folder} and it is made again)") from error


def _parents() -> list[Path]:
    """Where prepared data may lie, in order of preference."""
    chosen = os.environ.get(CACHE_VARIABLE)
    places = []
    with contextlib.suppress(RuntimeError):  # no home folder
        places.append(Path(chosen) if chosen else Path.home() / ".cache" / "moe_lab")
    places.append(Path(tempfile.gettempdir()) / f"moe_lab-{os.getuid()}")
    # A name in the shared temporary folder could be someone else's, with whatever tokens they put there.
    return [p / "tokens" for p in places if not os.path.lexists(p) or p is places[0] or _is_mine(p)]


def _is_mine(path: Path) -> bool:
    status = path.lstat()
    return (
        path.is_dir()
        and not path.is_symlink()
        and status.st_uid == os.getuid()
        and not status.st_mode & 0o022
    )


def _writable_parent() -> Path:
    """The first place in which a folder can be made now."""
    reasons = []
    for parent in _parents():
        try:
            parent.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            parent.mkdir(exist_ok=True)
            with tempfile.TemporaryFile(dir=parent):
                return parent
        except OSError as error:
            reasons.append(f"{parent} ({error.strerror or error})")
    raise DataError(
        f"no folder for prepared data can be written: tried {', '.join(reasons)}; set {CACHE_VARIABLE} to one that can"
    )


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock that ends with the process; without one where the file system has no locks."""
    with open(path, "w") as lock:
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
