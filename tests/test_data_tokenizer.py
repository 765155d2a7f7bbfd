"""Tokenizers: there and back, determinism, and an end-of-document token that no text can spell."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_lab.data import BpeTokenizer, ByteTokenizer, load_tokenizer, prepare
from moe_lab.data import text as text_module
from moe_lab.data.text import split_text
from moe_lab.errors import ConfigError, DataError

KJV = Path(__file__).parents[1] / "data/kjv.txt"
SAMPLE = KJV.read_text()[:200_000]
texts = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))


@pytest.fixture(scope="module")
def bpe() -> BpeTokenizer:
    return BpeTokenizer.train([SAMPLE], 600)


@given(texts)
def test_bytes_there_and_back(text: str) -> None:
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(text)
    assert ids.dtype == np.int64
    assert ids.tolist() == list(text.encode())
    assert tokenizer.eod not in ids
    assert tokenizer.decode(ids) == text


def test_bytes_decode_anything() -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.decode([]) == ""
    assert tokenizer.decode([104, 0, 105, 0]) == "hi"
    assert tokenizer.decode([104, 300, -1, 0xC3]) == "h\ufffd\ufffd\ufffd"
    import torch

    assert tokenizer.decode(torch.tensor([[104], [105]])) == "hi"


def test_bytes_refuse_what_would_end_a_document() -> None:
    with pytest.raises(DataError, match="byte 1"):
        ByteTokenizer().encode("a\0")
    with pytest.raises(DataError, match="surrogate"):
        ByteTokenizer().encode("a\ud800")


def test_bpe_there_and_back(bpe: BpeTokenizer) -> None:
    @settings(deadline=None)
    @given(texts)
    def check(text: str) -> None:
        ids = bpe.encode(text)
        assert ids.dtype == np.int64
        assert bpe.eod not in ids
        assert all(0 <= i < bpe.vocab_size for i in ids)
        assert bpe.decode(ids) == text

    check()
    assert bpe.vocab_size == 600
    assert len(bpe.encode(SAMPLE)) < len(SAMPLE) / 2
    assert [x.tolist() for x in bpe.encode_batch(["a b", ""])] == [bpe.encode("a b").tolist(), []]


def test_bpe_text_cannot_spell_the_end_of_a_document(bpe: BpeTokenizer, tmp_path: Path) -> None:
    bpe.save(tmp_path)
    for tokenizer in (bpe, BpeTokenizer.load(tmp_path)):
        ids = tokenizer.encode("a<|endoftext|>b")
        assert tokenizer.eod not in ids
        assert tokenizer.decode(ids) == "a<|endoftext|>b"
        assert tokenizer.decode([*ids, tokenizer.eod]) == "a<|endoftext|>b"


def test_bpe_decodes_ids_out_of_range(bpe: BpeTokenizer) -> None:
    ids = bpe.encode("and")
    assert bpe.decode([600, *ids, -1, 10**6]) == "\ufffdand\ufffd\ufffd"


def test_bpe_refuses_half_a_surrogate(bpe: BpeTokenizer) -> None:
    with pytest.raises(DataError, match="surrogate"):
        bpe.encode("a\ud800")


def test_bpe_training_is_deterministic_whatever_the_threads() -> None:
    code = (
        "import hashlib, sys; from moe_lab.data import BpeTokenizer; from pathlib import Path;"
        f"t = Path({str(KJV)!r}).read_text()[:200000];"
        "print(hashlib.sha256(BpeTokenizer.train([t[:9999], t[9999:]], 600).backend.to_str().encode()).hexdigest())"
    )
    environment = {**os.environ, "RAYON_NUM_THREADS": "1"}
    there = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    here = BpeTokenizer.train([SAMPLE[:9999], SAMPLE[9999:]], 600).backend.to_str()
    assert there.stdout.strip() == hashlib.sha256(here.encode()).hexdigest()


def test_bpe_of_a_small_text_stays_small() -> None:
    tokenizer = BpeTokenizer.train(["ab ab"], 5000)
    assert 257 <= tokenizer.vocab_size < 300
    assert tokenizer.decode(tokenizer.encode("Ἐν\n\tab")) == "Ἐν\n\tab"


def test_cut_text_gives_the_tokens_of_the_whole(bpe: BpeTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    hard = SAMPLE[:30_000] + "  two   spaces\n\n \n lines'll \t end 12 34 don't " * 200
    whole = bpe.encode(hard).tolist()
    for size in (60, 100, 1000):
        monkeypatch.setattr(text_module, "PIECE", size)
        pieces = list(split_text(hard))
        assert len(pieces) > 10
        assert "".join(pieces) == hard
        assert np.concatenate(bpe.encode_batch(pieces)).tolist() == whole


@pytest.mark.parametrize("size", [256, 0, -1, 1 << 21, 1000.0, True, "600"])
def test_bpe_sizes_out_of_range(size: object) -> None:
    with pytest.raises(ConfigError, match="257"):
        BpeTokenizer.train(["x"], size)  # type: ignore[arg-type]


def test_end_of_document_of_a_foreign_tokenizer(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    backend = Tokenizer(models.WordLevel({"[UNK]": 0, "hello": 1}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.add_special_tokens(["[STOP]"])
    backend.save(str(tmp_path / "t.json"))
    with pytest.raises(ConfigError, match=r"\[STOP\]"):
        BpeTokenizer.load(tmp_path / "t.json")
    with pytest.raises(ConfigError, match="hello"):
        BpeTokenizer.load(tmp_path / "t.json", "hello")
    tokenizer = BpeTokenizer.load(tmp_path / "t.json", "[STOP]")
    assert (tokenizer.eod, tokenizer.vocab_size) == (2, 3)
    assert tokenizer.encode("hello").tolist() == [1]


def test_load_tokenizer(tmp_path: Path, bpe: BpeTokenizer) -> None:
    assert load_tokenizer("byte").name == "byte"
    (tmp_path / "a.txt").write_text(SAMPLE[:20_000])
    prepare([tmp_path / "a.txt"], tmp_path / "bytes")
    prepare([tmp_path / "a.txt"], tmp_path / "bpe", tokenizer="bpe", vocab_size=300)
    assert load_tokenizer(tmp_path / "bytes").name == "byte"
    assert load_tokenizer(tmp_path / "bpe").vocab_size == 300
    bpe.save(tmp_path / "own.json")
    assert load_tokenizer(str(tmp_path / "own.json")).vocab_size == 600
    with pytest.raises(DataError, match="no tokenizer 'gpt'"):
        load_tokenizer("gpt")


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff", b'{"a": 1}', b"[" * 10_000])
def test_tokenizer_files_that_are_none(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(DataError, match=r"tokenizer\.json"):
        BpeTokenizer.load(tmp_path)
    with pytest.raises(DataError, match="No such file"):
        BpeTokenizer.load(tmp_path / "missing.json")
