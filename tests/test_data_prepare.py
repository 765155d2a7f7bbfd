"""Preparation: what a token folder holds, how validation is chosen, and that a failure leaves nothing behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_lab.data import BpeTokenizer, ByteTokenizer, TokenFolder, prepare
from moe_lab.data import writer as writer_module
from moe_lab.errors import ConfigError, DataError

KJV = Path(__file__).parents[1] / "data/kjv.txt"


def write(path: Path, content: str | list[str]) -> Path:
    """A text file, or a .jsonl of several documents."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(content, list):
        content = "".join(json.dumps({"text": text}) + "\n" for text in content)
    path.write_text(content)
    return path


def split_documents(folder: TokenFolder, split: str) -> list[str]:
    """The documents of a split, as text."""
    tokens = np.asarray(folder.tokens(split))
    if len(tokens) == 0:
        return []
    assert tokens[-1] == folder.eod  # an end-of-document token after each, the last one too
    tokenizer = folder.tokenizer()
    return [
        tokenizer.decode(part) for part in np.split(tokens, np.flatnonzero(tokens == folder.eod) + 1)[:-1]
    ]


def left_behind(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def test_king_james(tmp_path: Path) -> None:
    started = time.perf_counter()
    folder = prepare([KJV], tmp_path / "out")
    assert time.perf_counter() - started < 1
    text = KJV.read_bytes()
    train, val = (tmp_path / "out/train.bin").read_bytes(), (tmp_path / "out/val.bin").read_bytes()
    assert len(train) == 2 * 4_083_329
    assert len(val) == 2 * 214_912
    # Raw little-endian uint16: every second byte is the text, the others are zero.
    assert train[:-2:2] + val[:-2:2] == text
    assert not any(train[1::2])
    assert train[-2:] == val[-2:] == b"\0\0"
    info = json.loads((tmp_path / "out/tokens.json").read_text())
    assert info == folder.info
    assert (info["schema"], info["dtype"], info["vocab_size"], info["eod"]) == (1, "uint16", 256, 0)
    assert info["tokenizer"] == {"name": "byte", "file": None, "eod_token": None}
    assert info["splits"]["train"] == {
        "file": "train.bin",
        "tokens": 4_083_329,
        "documents": 1,
        "text_bytes": 4_083_328,
    }
    assert info["splits"]["val"]["text_bytes"] == int(len(text) * 0.05)
    assert info["split"]["rule"] == "tails"
    assert info["sources"][0]["bytes"] == len(text)
    assert info["sources"][0]["sha256"] == "6f74f5589333c56c263963e6347dba662bae2d96861302e690aaae0b4a855eda"
    assert left_behind(tmp_path) == ["out"]


def test_files_folders_and_formats_together(tmp_path: Path) -> None:
    import gzip

    write(tmp_path / "in/b.txt", "file b")
    (tmp_path / "in/a.jsonl.gz").write_bytes(gzip.compress(b'{"text": "line 1"}\n{"text": "line 2"}\n'))
    write(tmp_path / "in/empty.txt", "")
    folder = prepare([write(tmp_path / "z.md", "file z"), tmp_path / "in"], tmp_path / "out", val_fraction=0)
    assert split_documents(folder, "train") == ["file z", "line 1", "line 2", "file b"]
    assert split_documents(folder, "val") == []
    assert folder.info["split"]["rule"] == "none"
    assert [s["documents"] for s in folder.info["sources"]] == [1, 2, 1, 0]
    assert folder.info["splits"]["train"]["documents"] == 4
    assert folder.info["splits"]["train"]["text_bytes"] == 24


@pytest.mark.parametrize("kind", ["byte", "bpe"])
def test_same_input_same_bytes(tmp_path: Path, kind: str) -> None:
    text = write(tmp_path / "a.txt", KJV.read_text()[:100_000])
    for out in ("one", "two"):
        prepare([text], tmp_path / out, tokenizer=kind, vocab_size=400 if kind == "bpe" else None)
    for name in left_behind(tmp_path / "one"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
    assert left_behind(tmp_path / "one") == left_behind(tmp_path / "two")
    assert TokenFolder.open(tmp_path / "one").fingerprint == TokenFolder.open(tmp_path / "two").fingerprint


def test_few_documents_give_their_tails(tmp_path: Path) -> None:
    texts = ["abcdefghij" * 10, "Ἐν ἀρχῇ ἦν ὁ λόγος " * 7, "xy"]
    folder = prepare([write(tmp_path / "a.jsonl", texts)], tmp_path / "out", val_fraction=0.25)
    info = folder.info
    assert info["split"]["rule"] == "tails"
    ids = [list(text.encode()) for text in texts]
    cut = [len(i) - int(len(i) * 0.25) for i in ids]
    assert folder.tokens("train").tolist() == [t for i, c in zip(ids, cut) for t in [*i[:c], 0]]
    assert folder.tokens("val").tolist() == [t for i, c in zip(ids, cut) if c < len(i) for t in [*i[c:], 0]]
    assert info["splits"]["train"]["documents"] == 3
    assert info["splits"]["val"]["documents"] == 2  # "xy" is too short to be cut
    assert sum(info["splits"][s]["text_bytes"] for s in ("train", "val")) == sum(map(len, ids))


def test_many_documents_are_chosen_whole_by_their_text(tmp_path: Path) -> None:
    texts = [f"document {i} " * (1 + i % 5) for i in range(400)]
    folder = prepare([write(tmp_path / "a.jsonl", texts + texts[:50])], tmp_path / "out", val_fraction=0.2)
    train, val = (split_documents(folder, s) for s in ("train", "val"))
    assert folder.info["split"]["rule"] == "documents"
    assert sorted(train + val) == sorted(texts + texts[:50])
    assert not set(train) & set(val)  # a copy never stands on the other side
    assert 0.12 < len(val) / 450 < 0.28
    assert folder.info["splits"]["val"]["text_bytes"] == sum(map(len, val))
    # Neither order nor file changes the choice, and a larger share only adds to it.
    for i, text in enumerate(reversed(texts)):
        write(tmp_path / f"files/{i:03}.txt", text)
    again = prepare([tmp_path / "files"], tmp_path / "again", val_fraction=0.2)
    assert set(split_documents(again, "val")) == set(val)
    more = prepare([tmp_path / "files"], tmp_path / "more", val_fraction=0.5)
    assert set(val) < set(split_documents(more, "val"))


def test_a_hash_that_chooses_no_document_falls_back_to_tails(tmp_path: Path) -> None:
    folder = prepare(
        [write(tmp_path / "a.jsonl", [f"{i} " * 200 for i in range(20)])],
        tmp_path / "out",
        val_fraction=0.004,
    )
    assert folder.info["split"]["rule"] == "tails"
    assert folder.count("val") > 20


@settings(max_examples=40, deadline=None)
@given(
    texts=st.lists(
        st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1),
        min_size=1,
        max_size=25,
    ),
    fraction=st.sampled_from([0.0, 0.05, 0.3, 0.9]),
    copy=st.integers(1, 9),
)
def test_no_token_is_lost_or_invented(tmp_path_factory, texts: list[str], fraction: float, copy: int) -> None:
    base = tmp_path_factory.mktemp("any")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer_module, "_COPY", copy)
        patch.setattr(writer_module, "_GROUP", copy)
        if fraction > 0 and len(texts) < 20 and all(int(len(t.encode()) * fraction) == 0 for t in texts):
            with pytest.raises(DataError, match="none for validation"):
                prepare([write(base / "a.jsonl", texts)], base / "out", val_fraction=fraction)
            assert left_behind(base) == ["a.jsonl"]
            return
        try:
            folder = prepare([write(base / "a.jsonl", texts)], base / "out", val_fraction=fraction)
        except DataError:  # 20 documents or more, the hash chose none, and all are too short for a tail
            assert len(texts) >= 20
            return
    train, val = (folder.tokens(s).tolist() for s in ("train", "val"))
    everything = [list(t.encode()) for t in texts]
    assert sorted(t for t in train + val if t) == sorted(t for ids in everything for t in ids)
    if folder.info["split"]["rule"] == "none":
        assert train == [t for ids in everything for t in [*ids, 0]]
    for split, tokens in (("train", train), ("val", val)):
        assert tokens.count(0) == folder.info["splits"][split]["documents"]
        assert len(tokens) - tokens.count(0) == folder.info["splits"][split]["text_bytes"]


def test_bpe_folder(tmp_path: Path) -> None:
    text = KJV.read_text()[:300_000]
    folder = prepare([write(tmp_path / "a.txt", text)], tmp_path / "out", tokenizer="bpe", vocab_size=500)
    assert folder.vocab_size == 500
    assert folder.info["tokenizer"] == {"name": "bpe", "file": "tokenizer.json", "eod_token": "<|endoftext|>"}
    assert "".join(split_documents(folder, "train") + split_documents(folder, "val")) == text
    assert sum(folder.info["splits"][s]["text_bytes"] for s in ("train", "val")) == len(text)
    # The saved tokenizer makes the same tokens elsewhere, by its file.
    prepare([tmp_path / "a.txt"], tmp_path / "again", tokenizer_file=tmp_path / "out/tokenizer.json")
    assert (tmp_path / "again/train.bin").read_bytes() == (tmp_path / "out/train.bin").read_bytes()


def test_large_vocabulary_is_uint32(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {f"w{i}": i for i in range(70_000)}
    backend = Tokenizer(models.WordLevel(words, unk_token="w0"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(["</s>"])
    backend.save(str(tmp_path / "words.json"))
    text = write(tmp_path / "a.txt", "w1 w65536 w69999 " * 20)
    folder = prepare([text], tmp_path / "out", tokenizer_file=tmp_path / "words.json")
    assert (folder.dtype, folder.vocab_size, folder.eod) == (np.dtype("<u4"), 70_001, 70_000)
    raw = np.fromfile(tmp_path / "out/train.bin", "<u4")
    assert raw.tolist() == [1, 65536, 69999] * 19 + [70_000]


def test_log_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(0, 10_000, 4))
    monkeypatch.setattr(writer_module.time, "monotonic", lambda: float(next(clock)))
    monkeypatch.setattr(writer_module, "_GROUP", 1)
    lines: list[str] = []
    prepare([write(tmp_path / "a.jsonl", ["x" * 600_000] * 8)], tmp_path / "out", log=lines.append)
    assert lines
    assert all("MB of text" in line for line in lines)


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ({"tokenizer": "words"}, "'words'"),
        ({"vocab_size": 300}, "256 ids"),
        ({"tokenizer": "bpe", "vocab_size": 100}, "100"),
        ({"tokenizer": "byte", "tokenizer_file": "x.json"}, "x.json"),
        ({"tokenizer": "bpe", "eod_token": "</s>"}, "eod_token"),
        ({"val_fraction": 1.0}, "1.0"),
        ({"val_fraction": -0.1}, "-0.1"),
        ({"val_fraction": float("nan")}, "nan"),
        ({"val_fraction": "0.1"}, "'0.1'"),
        ({"val_fraction": True}, "True"),
    ],
)
def test_settings_that_do_not_fit(tmp_path: Path, arguments: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigError) as caught:
        prepare([tmp_path / "never read"], tmp_path / "out", **arguments)
    assert word in str(caught.value)
    assert left_behind(tmp_path) == []


def test_vocab_size_beside_a_tokenizer_file_has_to_agree(tmp_path: Path) -> None:
    BpeTokenizer.train(["some text"], 300).save(tmp_path / "t.json")
    text = write(tmp_path / "a.txt", "some text " * 50)
    with pytest.raises(ConfigError, match="vocab_size is 999"):
        prepare([text], tmp_path / "out", tokenizer_file=tmp_path / "t.json", vocab_size=999)
    assert left_behind(tmp_path) == ["a.txt", "t.json"]


@pytest.mark.parametrize("kind", ["byte", "bpe"])
@pytest.mark.parametrize("bad", [b"", b"a\0", b"\xff", None])
def test_a_bad_file_among_good_ones_leaves_nothing(tmp_path: Path, kind: str, bad: bytes | None) -> None:
    inputs = [write(tmp_path / "in/a.txt", "good " * 1000), tmp_path / "in/b.txt"]
    if bad is not None:
        inputs[1].write_bytes(bad)
    with pytest.raises(DataError) as caught:
        prepare(inputs, tmp_path / "new/deep/out", tokenizer=kind)
    assert "b.txt" in str(caught.value)
    assert left_behind(tmp_path) == ["in"]


def test_too_little_text_for_validation(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="none for validation"):
        prepare([write(tmp_path / "a.txt", "tiny")], tmp_path / "out")
    assert left_behind(tmp_path) == ["a.txt"]


def test_a_folder_of_empty_files(tmp_path: Path) -> None:
    write(tmp_path / "in/a.txt", "")
    with pytest.raises(DataError, match="no text"):
        prepare([tmp_path / "in"], tmp_path / "out")
    assert left_behind(tmp_path) == ["in"]


def test_output_that_exists_is_not_touched(tmp_path: Path) -> None:
    text = write(tmp_path / "a.txt", "words " * 100)
    write(tmp_path / "full/mine.txt", "keep")
    for out in (tmp_path / "full", text):
        with pytest.raises(DataError, match="already exists"):
            prepare([text], out)
    assert (tmp_path / "full/mine.txt").read_text() == "keep"
    (tmp_path / "empty").mkdir()
    assert prepare([text], tmp_path / "empty").count("train") > 0
    with pytest.raises(DataError, match="already exists"):
        prepare([text], tmp_path / "empty")
    assert left_behind(tmp_path) == ["a.txt", "empty", "full"]


def test_output_that_appears_meanwhile_is_not_touched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = write(tmp_path / "a.txt", "words " * 100)
    encode = ByteTokenizer.encode_batch

    def encode_and_interfere(self: ByteTokenizer, texts: list[str]) -> Any:
        write(tmp_path / "out/theirs", "keep")
        return encode(self, texts)

    monkeypatch.setattr(ByteTokenizer, "encode_batch", encode_and_interfere)
    with pytest.raises(DataError, match="already exists"):
        prepare([text], tmp_path / "out")
    assert left_behind(tmp_path) == ["a.txt", "out"]
    assert left_behind(tmp_path / "out") == ["theirs"]


@pytest.mark.parametrize("out", ["a.txt/below", "/proc/out", "/dev/null/out", "o\0ut", "x" * 300])
def test_output_that_cannot_be_written(tmp_path: Path, out: str) -> None:
    text = write(tmp_path / "a.txt", "words " * 100)
    with pytest.raises(DataError) as caught:
        prepare([text], tmp_path / out)
    assert "cannot" in str(caught.value)
    assert left_behind(tmp_path) == ["a.txt"]


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), KeyboardInterrupt(), RuntimeError("bug")]
)
def test_an_error_half_way_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    text = write(tmp_path / "a.jsonl", ["words " * 1000] * 30)
    seen = []

    def fail(self: ByteTokenizer, texts: list[str]) -> Any:
        seen.extend(p.name for p in tmp_path.glob(".out.*.tmp/*"))
        if len(seen) > 8:
            raise error
        return [np.frombuffer(t.encode(), np.uint8).astype(np.int64) for t in texts]

    monkeypatch.setattr(writer_module, "_GROUP", 1)
    monkeypatch.setattr(ByteTokenizer, "encode_batch", fail)
    expected = DataError if isinstance(error, OSError) else type(error)
    with pytest.raises(expected) as caught:
        prepare([text], tmp_path / "out")
    assert "train.bin" in seen  # it was being written
    assert left_behind(tmp_path) == ["a.jsonl"]
    if isinstance(error, OSError):
        assert "cannot write" in str(caught.value)
        assert "No space left" in str(caught.value)


def test_a_kill_half_way_leaves_no_folder_and_no_obstacle(tmp_path: Path) -> None:
    text = write(tmp_path / "a.jsonl", ["words " * 1000] * 30)
    code = """
import sys, time
from moe_lab.data import ByteTokenizer, prepare, writer
writer._GROUP = 1
encode = ByteTokenizer.encode_batch
def slow(self, texts):
    print("writing", flush=True)
    time.sleep(0.05)
    return encode(self, texts)
ByteTokenizer.encode_batch = slow
prepare([sys.argv[1]], sys.argv[2])
"""
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(text), str(tmp_path / "out")], stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    with process.stdout as lines:
        for _ in range(3):
            assert lines.readline() == b"writing\n"
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    assert not (tmp_path / "out").exists()
    assert all(name == "a.jsonl" or name.startswith(".out.") for name in left_behind(tmp_path))
    assert prepare([text], tmp_path / "out").count("train") > 100_000
