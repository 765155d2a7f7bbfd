"""Documents out of text files, in pieces.

A plain file is one document; each line of a ``.jsonl`` file is one, its text in the field ``text``. Every way in which a
file can fail to be text is a :class:`DataError` that names the file and the byte or line.

Used by lesson 00_start_here through :func:`moe_lab.data.prepare`.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator

from moe_lab.data.files import Source, read_chunks
from moe_lab.errors import DataError

PIECE = 1 << 18  # characters handed on at a time
LINE_LIMIT = 64 << 20  # bytes of one JSONL line; a longer one is refused rather than held in memory


def _decoded(source: Source, data: bytes, offset: int, where: str = "") -> str:
    """``data``, which starts ``offset`` bytes into the file's text, as UTF-8 without NUL; :class:`DataError` otherwise."""
    advice = "; choose the folder's files with include" if source.from_folder else "; leave it out"
    if offset == 0 and data[:2] in (b"\xff\xfe", b"\xfe\xff"):
        raise DataError(f"{source.path} is UTF-16, not UTF-8: convert it first (iconv -f UTF-16 -t UTF-8)")
    nul = data.find(b"\0")
    if nul >= 0:
        raise DataError(
            f"{source.path} is binary, not text: it has a NUL byte at byte {offset + nul}{where}{advice}"
        )
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        at = offset + error.start
        raise DataError(
            f"{source.path} is not UTF-8: byte {at}{where} is {data[error.start]:#04x} ({error.reason}); convert it to UTF-8{advice.replace('; ', ' or ')}"
        ) from None


def _whole_characters(data: bytes) -> int:
    """The length of ``data`` without a UTF-8 character that its end may have cut."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(data[-4:])
    return len(data) - len(decoder.getstate()[0])


def safe_cut(text: str, limit: int) -> int:
    """Where to cut ``text`` within ``limit`` characters so that byte-level BPE gives the tokens of the uncut text.

    Such a tokenizer never merges across the start of a word, and reads a single space before a word as part of the word.
    So the cut goes before the last such space. Returns 0 if there is none.
    """
    end = limit
    while (at := text.rfind(" ", 1, end)) > 0:
        if not text[at - 1].isspace() and at + 1 < len(text) and not text[at + 1].isspace():
            return at
        end = at
    return 0


def split_text(text: str) -> Iterator[str]:
    """``text`` in pieces of at most ``PIECE`` characters, cut by :func:`safe_cut` (anywhere, in text without spaces)."""
    start = 0
    while len(text) - start > PIECE:
        window = text[start : start + PIECE + 1]
        cut = safe_cut(window, PIECE) or PIECE
        yield window[:cut]
        start += cut
    yield text[start:]


def _text_pieces(source: Source) -> Iterator[tuple[str, bool]]:
    offset, rest, pending = 0, b"", ""
    for chunk in read_chunks(source):
        data = rest + chunk
        whole = _whole_characters(data)
        rest = data[whole:]
        text = _decoded(source, data[:whole], offset)
        pending += text.removeprefix("\ufeff") if offset == 0 else text
        offset += whole
        *ready, pending = split_text(pending)
        for piece in ready:
            yield piece, False
    yield pending + _decoded(source, rest, offset), True


def _lines(source: Source) -> Iterator[bytes]:
    rest = b""
    number = 1
    for chunk in read_chunks(source):
        *lines, rest = (rest + chunk).split(b"\n")
        yield from lines
        number += len(lines)
        if len(rest) > LINE_LIMIT:
            raise DataError(
                f"{source.path}, line {number} is longer than {LINE_LIMIT >> 20} MiB: a .jsonl file holds one document a line"
            )
    yield rest


def _jsonl_pieces(source: Source) -> Iterator[tuple[str, bool]]:
    offset = 0
    for number, line in enumerate(_lines(source), 1):
        where = f"{source.path}, line {number}"
        text = _decoded(source, line, offset, where=f" (line {number})")
        text = text.removeprefix("\ufeff") if number == 1 else text
        offset += len(line) + 1
        if not text.strip():
            continue
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as error:
            reason = getattr(error, "msg", None) or str(error).split(":")[0]
            raise DataError(
                f"{where} is not JSON ({reason}): a .jsonl file holds one object a line"
            ) from None
        document = value.get("text") if isinstance(value, dict) else None
        if not isinstance(document, str):
            found = (
                f"a {type(value).__name__}" if not isinstance(value, dict)
                else f"{type(document).__name__} there" if "text" in value
                else f"fields {', '.join(map(repr, list(value)[:8])) or 'none'}"
            )  # fmt: skip
            raise DataError(
                f'{where} has no text: each line needs a field "text" that holds a string, but got {found}'
            )
        # JSON can spell characters that UTF-8 text cannot hold: NUL, and halves of surrogate pairs.
        if "\0" in document:
            raise DataError(f"{where} has a NUL character in its text: remove it")
        try:
            document.encode("utf-8")
        except UnicodeEncodeError as error:
            raise DataError(
                f"{where} has half a surrogate pair at character {error.start} of its text: remove it"
            ) from None
        if document:
            pieces = split_text(document)
            previous = next(pieces)
            for piece in pieces:
                yield previous, False
                previous = piece
            yield previous, True


def read_pieces(source: Source) -> Iterator[tuple[str, bool]]:
    """The documents of ``source`` as (piece of text, whether it ends its document), in order; sets ``source``'s counts.

    Documents without any text are left out. Raises :class:`DataError` if the file cannot be read, decompressed, decoded
    or parsed, and if a file that the caller named holds no text at all (one found in a folder is passed over).
    """
    pieces = _jsonl_pieces(source) if source.is_jsonl else _text_pieces(source)
    source.documents = 0
    started = False
    for piece, ends in pieces:
        started = started or bool(piece)
        if started:
            source.documents += ends
            yield piece, ends
        if ends:
            started = False
    if source.documents == 0 and not source.from_folder:
        raise DataError(f"{source.path} is empty: it holds no text, so leave it out")
