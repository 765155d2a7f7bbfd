"""Documents out of files: what is read, what is refused, and with which sentence."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_lab.data import files, text
from moe_lab.data.files import Source, find_sources
from moe_lab.data.text import read_pieces
from moe_lab.errors import DataError


def documents(path: Path, from_folder: bool = False) -> list[str]:
    found, current = [], ""
    for piece, ends in read_pieces(Source(path, from_folder)):
        current += piece
        if ends:
            found.append(current)
            current = ""
    assert current == ""
    return found


def refused(path: Path, *words: str) -> None:
    with pytest.raises(DataError) as caught:
        documents(path)
    message = str(caught.value)
    assert str(path) in message
    assert "\n" not in message
    for word in words:
        assert word in message, message


PACKERS = {"": bytes, ".gz": gzip.compress, ".zst": zstandard.ZstdCompressor(write_checksum=True).compress}


@pytest.mark.parametrize("packed", PACKERS)
def test_text_and_jsonl_plain_and_compressed(tmp_path: Path, packed: str) -> None:
    plain, lines = tmp_path / f"a.txt{packed}", tmp_path / f"b.JSONL{packed}"
    plain.write_bytes(PACKERS[packed]("In the beginning – Ἐν ἀρχῇ\n".encode()))
    rows = [{"text": "one"}, {"id": 7, "text": "two\nlines"}, {"text": ""}, {"text": "Ἐν \U0001f600"}]
    lines.write_bytes(PACKERS[packed](("\n".join(map(json.dumps, rows)) + "\n\n").encode()))
    assert documents(plain) == ["In the beginning – Ἐν ἀρχῇ\n"]
    assert documents(lines) == ["one", "two\nlines", "Ἐν \U0001f600"]


def test_size_hash_and_count_of_a_source(tmp_path: Path) -> None:
    import hashlib

    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"text": "x"}\n{"text": "y"}'))
    source = Source(path)
    list(read_pieces(source))
    assert (source.documents, source.bytes) == (2, path.stat().st_size)
    assert source.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


def test_byte_order_mark_is_dropped(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfhello")
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "hello"}\n')
    assert documents(tmp_path / "a.txt") == documents(tmp_path / "a.jsonl") == ["hello"]


@settings(deadline=None)
@given(
    content=st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1),
    chunk=st.integers(1, 7),
)
def test_pieces_join_to_the_text_wherever_chunks_end(tmp_path_factory, content: str, chunk: int) -> None:
    path = tmp_path_factory.getbasetemp() / "chunks.txt"
    path.write_bytes(content.encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "CHUNK", chunk)
        patch.setattr(text, "PIECE", 3)
        pieces = list(read_pieces(Source(path, from_folder=True)))
    expected = content.removeprefix("\ufeff")
    assert "".join(piece for piece, _ in pieces) == expected
    assert all(len(piece) <= 3 for piece, _ in pieces)
    assert [ends for _, ends in pieces] == [False] * (len(pieces) - 1) + [True] * bool(pieces)


@settings(deadline=None)
@given(data=st.binary(max_size=60))
def test_any_bytes_give_documents_or_a_data_error(tmp_path_factory, data: bytes) -> None:
    for name in ("f.txt", "f.jsonl", "f.txt.gz", "f.jsonl.zst"):
        path = tmp_path_factory.getbasetemp() / name
        path.write_bytes(data)
        try:
            found = documents(path)
        except DataError:
            continue
        assert all(found)


json_values = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(st.characters()),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@settings(deadline=None)
@given(value=json_values | st.fixed_dictionaries({"text": json_values}))
def test_any_json_line_gives_a_document_or_a_data_error(tmp_path_factory, value: Any) -> None:
    path = tmp_path_factory.getbasetemp() / "any.jsonl"
    path.write_text('{"text": "first"}\n' + json.dumps(value))
    text = value.get("text") if isinstance(value, dict) else None
    if not isinstance(text, str) or any(c == "\0" or "\ud800" <= c <= "\udfff" for c in text):
        refused(path, "line 2")
    else:
        assert documents(path) == ["first"] + [text] * bool(text)


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz", "a.jsonl", "a.jsonl.zst"])
def test_empty_file(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    for data in (b"", PACKERS[path.suffix if path.suffix in PACKERS else ""](b"")):
        path.write_bytes(data)
        refused(path, "is empty")
        assert documents(path, from_folder=True) == []  # passed over inside a folder


def test_lines_without_any_text(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('\n{"text": ""}\n\n')
    refused(path, "is empty")


def test_binary_and_wrong_encodings(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"abc\0def")
    refused(path, "binary", "NUL byte at byte 3")
    path.write_bytes("Grüße".encode("latin-1"))
    refused(path, "not UTF-8", "byte 2 is 0xfc")
    path.write_bytes(b"x" * (files.CHUNK + 10) + b"\xff")
    refused(path, f"byte {files.CHUNK + 10} is 0xff")
    path.write_bytes(b"x" * (files.CHUNK - 1) + "é".encode() + b"\0")
    refused(path, f"byte {files.CHUNK + 1}")
    path.write_bytes("Ἐν".encode()[:-1])
    refused(path, "byte 3 is 0xce", "unexpected end")
    path.write_bytes("hello".encode("utf-16"))
    refused(path, "UTF-16")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", ["line 2", "not JSON"]),
        ("[" * 100_000, ["line 2", "not JSON"]),
        ("9" * 5000, ["line 2", "not JSON"]),
        ('{"content": "x"}', ["line 2", "'content'"]),
        ("{}", ["line 2", "none"]),
        ('{"text": null}', ["line 2", "NoneType"]),
        ('{"text": ["x"]}', ["line 2", "list"]),
        ('"x"', ["line 2", "a str"]),
        (r'{"text": "a\u0000b"}', ["line 2", "NUL"]),
        (r'{"text": "ab\ud800"}', ["line 2", "surrogate", "character 2"]),
    ],
)
def test_bad_json_lines(tmp_path: Path, line: str, words: list[str]) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "good"}\n' + line + "\n")
    refused(path, *words)


def test_bad_bytes_in_a_json_line_name_line_and_byte(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "ok"}\n{"text": "\xe9"}\n')
    refused(path, "byte 25", "line 2")
    path.write_bytes(b'{"text": "ok"}\n{"text": "\0"}\n')
    refused(path, "byte 25", "line 2", "NUL")


def test_overlong_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text, "LINE_LIMIT", 1 << 20)
    monkeypatch.setattr(files, "CHUNK", 1 << 16)
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a"}\n' + json.dumps({"text": "x" * (1 << 21)}))
    refused(path, "line 2", "longer than 1 MiB")


@pytest.mark.parametrize("packed", [".gz", ".zst"])
def test_damaged_archives(tmp_path: Path, packed: str) -> None:
    path = tmp_path / f"a.txt{packed}"
    # Random letters, so that the compressed file is longer than one read.
    whole = PACKERS[packed](os.urandom(20_000).hex().encode())
    path.write_bytes(b"plain text")
    refused(path, "cannot be decompressed")
    for cut in (5, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:cut])
        refused(path, "cannot be decompressed")
    path.write_bytes(whole[:1000] + bytes(100) + whole[1100:])
    refused(path, "cannot be decompressed")  # both formats hold checksums


def test_several_zstd_frames_and_a_high_ratio(tmp_path: Path) -> None:
    path = tmp_path / "a.txt.zst"
    pack = zstandard.ZstdCompressor().compress
    path.write_bytes(pack(b"one ") + pack(b"") + pack(b"a" * (1 << 25)) + pack(b" end"))
    assert path.stat().st_size < 1 << 13
    (document,) = documents(path)
    assert document == "one " + "a" * (1 << 25) + " end"
    assert max(len(chunk) for chunk in files.read_chunks(Source(path))) <= 33 << 20


def test_find_sources(tmp_path: Path) -> None:
    for name in (
        "b/two.md",
        "b/one.txt",
        "b/.hidden",
        ".git/config",
        "a.jsonl",
        "done/tokens.json",
        "done/train.bin",
    ):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("x")
    (tmp_path / "b/loop").symlink_to(tmp_path)
    os.mkfifo(tmp_path / "b/pipe")
    names = [str(s.path.relative_to(tmp_path)) for s in find_sources([tmp_path])]
    assert names == ["a.jsonl", "b/one.txt", "b/two.md"]
    assert [s.path.name for s in find_sources([tmp_path / "b/two.md", tmp_path / "b"])] == [
        "two.md",
        "one.txt",
    ]
    assert [s.path.name for s in find_sources([tmp_path], include=["*.md", "a*"])] == ["a.jsonl", "two.md"]


def test_inputs_that_are_not_there(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "none").mkdir()
    (tmp_path / "loop").symlink_to("loop")
    os.mkfifo(tmp_path / "pipe")
    for given_, word in (
        ([], "no input"),
        ([tmp_path / "missing.txt"], "missing.txt does not exist"),
        ([tmp_path / "file/below"], "does not exist"),
        (["a\0b"], "does not exist"),
        ([tmp_path / "loop"], "loop"),
        ([tmp_path / "pipe"], "neither a regular file"),
        ([tmp_path / "none"], "holds no files"),
    ):
        with pytest.raises(DataError) as caught:
            find_sources(given_)
        assert word in str(caught.value)
    with pytest.raises(DataError, match=r"\*\.md"):
        find_sources([tmp_path], include=["*.md"])


def test_a_bad_file_in_a_folder_says_how_to_leave_it_out(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"\0")
    (source,) = find_sources([tmp_path])
    with pytest.raises(DataError, match="with include"):
        list(read_pieces(source))
