"""Text to a folder of token files.

Everything is streamed: memory does not grow with the input. The folder appears under its name only when it is complete;
until then it is a hidden neighbour, ``.NAME.*.tmp``, which an error removes and which only a killed process can leave.

Built for lesson 00_start_here and ``moe-lab data prepare``.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import moe_lab
from moe_lab.data.files import SIDE_FILE, Source, find_sources
from moe_lab.data.folder import SCHEMA, TokenFolder, token_dtype
from moe_lab.data.settings import Settings
from moe_lab.data.text import read_pieces
from moe_lab.data.tokenizer import TOKENIZER_FILE, BpeTokenizer
from moe_lab.data.writer import SplitWriter
from moe_lab.errors import DataError
from moe_lab.records import write_json

FEW_DOCUMENTS = 20  # with fewer, each gives its tail to validation; with more, whole documents are chosen

RULES = {
    "documents": "a document is for validation if the first 64 bits of its text's BLAKE2b hash, as a fraction, are below val_fraction",
    "tails": "the last val_fraction of each document's tokens, rounded down, are for validation; both parts get an end-of-document token",
    "none": "val_fraction is 0: all tokens are for training",
}


def prepare(
    inputs: Sequence[str | Path],
    out: str | Path,
    *,
    tokenizer: str | None = None,
    vocab_size: int | None = None,
    tokenizer_file: str | Path | None = None,
    eod_token: str | None = None,
    val_fraction: float = 0.05,
    include: Sequence[str] = (),
    log: Callable[[str], None] | None = None,
) -> TokenFolder:
    """Tokenize ``inputs`` into the new folder ``out``; see :mod:`moe_lab.data.folder` for what it holds.

    ``inputs``: text files (one document each), ``.jsonl`` files (one document a line, in its field ``text``), either one
    also as ``.gz`` or ``.zst``, and folders of them, of which ``include`` can choose files by patterns such as ``*.txt``.
    ``tokenizer``: ``byte`` (the default), or ``bpe``: trained on these inputs to ``vocab_size`` ids (4096 if left out;
    fewer if the text has too few different pairs), or read from ``tokenizer_file``, whose special token ``eod_token``
    ends a document (found by itself if it has one of the usual names).
    ``val_fraction``: with 20 documents or more, whole documents are chosen for validation by a hash of their text, so
    copies of a document stay on one side; with fewer, or if the hash chose all or none, the last part of each document
    is taken. ``tokens.json`` says which.
    ``log`` is given a line every few seconds.

    The same inputs and settings give the same bytes. Raises :class:`ConfigError` for settings and :class:`DataError` for
    inputs that cannot be used or a folder that exists or cannot be written; nothing is left behind then.
    """
    settings = Settings.check(tokenizer, vocab_size, tokenizer_file, eod_token, val_fraction)
    out = Path(out)
    _refuse_existing(out)
    sources = find_sources([inputs] if isinstance(inputs, (str, Path)) else inputs, include)
    with _new_folder(out) as folder:
        _write(folder, sources, settings, log or (lambda line: None))
    return TokenFolder.open(out)


def _write(folder: Path, sources: list[Source], settings: Settings, log: Callable[[str], None]) -> None:
    tokenizer = settings.make(sources)
    if isinstance(tokenizer, BpeTokenizer):
        tokenizer.save(folder)
    if settings.val_fraction == 0:
        rules = ["none"]
    else:
        rules = ["documents", "tails"] if _has_many_documents(sources) else ["tails"]
    for rule in rules:
        with SplitWriter(folder, tokenizer, settings.val_fraction, rule) as writer:
            writer.write_all(sources, log)
            train, val = writer.counts["train"], writer.counts["val"]
        if train["tokens"] and (val["tokens"] or rule == "none"):
            break
    if not train["documents"]:
        raise DataError(f"{', '.join(str(s.path) for s in sources[:4])} holds no text: nothing to prepare")
    if not val["tokens"] and rule != "none":
        raise DataError(
            f"val_fraction {settings.val_fraction} of {train['tokens']} tokens leaves none for validation: give more text, a larger "
            "val_fraction, or 0 to do without"
        )
    bpe = tokenizer if isinstance(tokenizer, BpeTokenizer) else None
    write_json(
        folder / SIDE_FILE,
        {
            "schema": SCHEMA,
            "moe_lab": moe_lab.__version__,
            "dtype": token_dtype(tokenizer.vocab_size).name,
            "vocab_size": tokenizer.vocab_size,
            "eod": tokenizer.eod,
            "tokenizer": {
                "name": tokenizer.name,
                "file": TOKENIZER_FILE if bpe else None,
                "eod_token": bpe.eod_token if bpe else None,
            },
            "splits": {split: {"file": f"{split}.bin", **counts} for split, counts in writer.counts.items()},
            "val_fraction": settings.val_fraction,
            "split": {"rule": rule, "description": RULES[rule]},
            "sources": [
                {"path": str(s.path), "bytes": s.bytes, "sha256": s.sha256, "documents": s.documents}
                for s in sources
            ],
        },
    )


def _has_many_documents(sources: list[Source]) -> bool:
    """Whether there are at least ``FEW_DOCUMENTS``, reading no further than needed to know."""
    count = sum(1 for source in sources if not source.is_jsonl)
    for source in sources:
        if source.is_jsonl and count < FEW_DOCUMENTS:
            for _, ends in read_pieces(source):
                count += ends
                if count >= FEW_DOCUMENTS:
                    break
    return count >= FEW_DOCUMENTS


def _refuse_existing(out: Path) -> None:
    if "\0" in str(out):
        raise DataError(f"the output folder cannot be called {str(out)!r}: the name holds a NUL character")
    try:
        if out.is_dir() and not any(out.iterdir()):
            return
        exists = out.exists() or out.is_symlink()
    except OSError as error:
        raise DataError(f"cannot write {out} ({error.strerror or error}): choose another folder") from error
    if exists:
        raise DataError(
            f"{out} already exists: prepared data is never overwritten, choose another folder or remove it"
        )


@contextlib.contextmanager
def _new_folder(out: Path) -> Iterator[Path]:
    """A temporary folder beside ``out`` that becomes ``out`` if the block succeeds and vanishes if it raises."""
    made: list[Path] = []  # parents that did not exist, the innermost first
    temporary: Path | None = None
    try:
        parent = Path(os.path.abspath(out)).parent
        made = [p for p in (parent, *parent.parents) if not p.exists()]
        parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(dir=parent, prefix=f".{out.name[:100]}.", suffix=".tmp"))
        yield temporary
        temporary.chmod(0o755)
        _refuse_existing(out)
        os.rename(temporary, out)
    except BaseException as error:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)
        for folder in made:
            with contextlib.suppress(OSError):  # not empty: someone else uses it by now
                folder.rmdir()
        if isinstance(error, OSError):
            raise DataError(
                f"cannot write {out} ({error.strerror or error}): choose another folder"
            ) from error
        raise
