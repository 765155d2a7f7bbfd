"""Opening token folders: damaged, foreign and hostile ones."""

from __future__ import annotations

import contextlib
import json
import pickle
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_lab.data import Batches, TokenFolder, prepare, token_dtype
from moe_lab.data import folder as folder_module
from moe_lab.errors import DataError


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "a.txt").write_text("In the beginning " * 100)
    return prepare([tmp_path / "a.txt"], tmp_path / "tokens").path


def minimal(path: Path, tokens: np.ndarray, vocab_size: int = 100, **changes: Any) -> Path:
    """A folder as someone else would make it: raw tokens and the required fields only."""
    path.mkdir(exist_ok=True)
    tokens.tofile(path / "train.bin")
    info = {
        "schema": 1, "dtype": tokens.dtype.name, "vocab_size": vocab_size, "eod": 0,
        "splits": {"train": {"file": "train.bin", "tokens": len(tokens)}}, **changes,
    }  # fmt: skip
    (path / "tokens.json").write_text(json.dumps(info))
    return path


def refused(path: Path, *words: str) -> None:
    with pytest.raises(DataError) as caught:
        TokenFolder.open(path)
    for word in words:
        assert word in str(caught.value)


def edit(path: Path, **changes: Any) -> None:
    info = json.loads((path / "tokens.json").read_text())
    (path / "tokens.json").write_text(json.dumps({**info, **changes}))


def test_open(path: Path) -> None:
    folder = TokenFolder.open(str(path))
    assert (folder.vocab_size, folder.eod, folder.dtype) == (256, 0, np.dtype("<u2"))
    assert folder.count("train") == len(folder.tokens("train")) == 1616
    assert folder.count("test") == 0
    tokens = folder.tokens("train")
    assert isinstance(tokens, np.memmap)
    with pytest.raises(ValueError, match="read-only"):
        tokens[0] = 1
    with pytest.raises(DataError, match="no split 'test'"):
        folder.tokens("test")


def test_sent_to_another_process_it_carries_no_tokens(path: Path) -> None:
    folder = TokenFolder.open(path)
    folder.tokens("train")
    data = pickle.dumps(folder)
    assert len(data) < 2000
    assert pickle.loads(data) == folder


def test_minimal_side_file(tmp_path: Path) -> None:
    folder = TokenFolder.open(minimal(tmp_path / "t", np.arange(50, dtype="<u4")))
    assert folder.tokens("train").tolist() == list(range(50))
    assert len(folder.fingerprint) == 16
    with pytest.raises(DataError, match="no tokenizer"):
        folder.tokenizer()


def test_missing_or_foreign_folder(tmp_path: Path, path: Path) -> None:
    refused(tmp_path / "none", "does not exist", "moe-lab data prepare")
    refused(tmp_path / "a.txt", "is not a folder")
    refused(tmp_path, "holds no tokens.json")
    (path / "tokens.json").unlink()
    refused(path, "holds no tokens.json")


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"null", b"\xff", b"{}", b'{"schema": 2}', b"[" * 100_000, b"9" * 5000]
)
def test_side_file_that_is_none(path: Path, content: bytes) -> None:
    (path / "tokens.json").write_bytes(content)
    refused(path, "tokens.json")


def test_side_file_too_large_to_be_one(path: Path) -> None:
    with open(path / "tokens.json", "r+b") as file:
        file.truncate(1 << 40)  # sparse
    refused(path, "tokens.json", str(1 << 40))


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"dtype": "int64"}, "dtype"),
        ({"dtype": ["uint16"]}, "dtype"),
        ({"vocab_size": 0}, "vocab_size"),
        ({"vocab_size": 65_537}, "65536"),
        ({"vocab_size": True}, "vocab_size"),
        ({"vocab_size": 256.0}, "vocab_size"),
        ({"eod": 256}, "eod"),
        ({"eod": None}, "eod"),
        ({"splits": {}}, "train split"),
        ({"splits": None}, "train split"),
        ({"splits": {"train": None}}, "must name a file"),
        ({"splits": {"train": {"file": "../a.txt", "tokens": 850}}}, "inside the folder"),
        ({"splits": {"train": {"file": "/etc/passwd", "tokens": 1}}}, "inside the folder"),
        ({"splits": {"train": {"file": "gone.bin", "tokens": 1}}}, "gone.bin"),
        ({"splits": {"train": {"file": "train.bin", "tokens": -1}}}, "tokens of split"),
        ({"splits": {"train": {"file": "train.bin", "tokens": 1615}}}, "1616"),
    ],
)
def test_side_file_that_contradicts_itself(path: Path, changes: dict[str, Any], word: str) -> None:
    edit(path, **changes)
    refused(path, word)


def test_truncated(path: Path) -> None:
    whole = (path / "train.bin").read_bytes()
    (path / "train.bin").write_bytes(whole[:-1])
    refused(path, "train.bin", "truncated in mid-token", "3231 bytes")
    (path / "train.bin").write_bytes(whole[:-2])
    refused(path, "1615 tokens", "1616")
    (path / "train.bin").write_bytes(whole + b"\0\0")
    refused(path, "1617 tokens", "1616")
    (path / "train.bin").write_bytes(whole)
    (path / "val.bin").write_bytes(b"x")
    refused(path, "val.bin", "mid-token")
    (path / "val.bin").unlink()
    refused(path, "val.bin", "No such file")


def test_id_outside_the_vocabulary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = np.zeros(1000, "<u2")
    tokens[777] = 100
    folder = minimal(tmp_path / "t", tokens, vocab_size=100)
    monkeypatch.setattr(folder_module, "_CHECK_CHUNK", 64)
    refused(folder, "token 777 has id 100", "100 ids")
    edit(folder, vocab_size=101)
    assert TokenFolder.open(folder).vocab_size == 101
    # The result of a check is kept, but not for another content.
    tokens[3] = 101
    time.sleep(0.01)
    tokens.tofile(folder / "train.bin")
    refused(folder, "token 3 has id 101")


def test_ids_of_large_files_are_checked_as_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder_module, "CHECK_LIMIT", 999)
    tokens = np.zeros(1000, "<u2")
    tokens[777] = 300
    batches = Batches(TokenFolder.open(minimal(tmp_path / "t", tokens)), "train", 10, shuffle=False)
    batches.batch(0, 77)
    with pytest.raises(DataError, match="token 777 has id 300"):
        batches.batch(0, 99)


def test_wrong_tokenizer(path: Path) -> None:
    edit(path, eod=1)
    with pytest.raises(DataError, match="eod 1"):
        TokenFolder.open(path).tokenizer()
    edit(path, eod=0, tokenizer={"name": "bpe", "file": "../secret.json"})
    with pytest.raises(DataError, match="no tokenizer"):
        TokenFolder.open(path).tokenizer()
    edit(path, tokenizer={"name": "bpe", "file": "tokenizer.json"})
    with pytest.raises(DataError, match=r"tokenizer\.json"):
        TokenFolder.open(path).tokenizer()


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
fields = st.fixed_dictionaries(
    {},
    optional={
        "schema": st.just(1) | json_values,
        "dtype": st.sampled_from(["uint16", "uint32"]) | json_values,
        "vocab_size": st.integers(0, 1 << 40) | json_values,
        "eod": st.integers(0, 300) | json_values,
        "tokenizer": json_values | st.fixed_dictionaries({"name": st.sampled_from(["byte", "bpe"]), "file": json_values, "eod_token": json_values}),
        "splits": json_values
        | st.fixed_dictionaries({"train": json_values | st.fixed_dictionaries({"file": st.just("train.bin") | json_values, "tokens": st.integers(0, 5) | json_values})}),
        "sources": json_values,
    },
)  # fmt: skip


@settings(deadline=None)
@given(info=fields | json_values, tokens=st.binary(max_size=8))
def test_any_side_file_gives_a_folder_or_a_data_error(tmp_path_factory, info: Any, tokens: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzz"
    path.mkdir(exist_ok=True)
    (path / "tokens.json").write_text(json.dumps(info))
    (path / "train.bin").write_bytes(tokens)
    with contextlib.suppress(DataError):
        folder = TokenFolder.open(path)
        assert folder.tokens("train").tobytes() == tokens
        assert folder.fingerprint
        folder.tokenizer()


def test_token_dtype() -> None:
    assert [token_dtype(v) for v in (1, 65_536, 65_537)] == [
        np.dtype("<u2"),
        np.dtype("<u2"),
        np.dtype("<u4"),
    ]
