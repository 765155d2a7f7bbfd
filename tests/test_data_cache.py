"""Prepared once, found again; several processes, no place to write, someone else's folder."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from moe_lab.data import cache as cache_module
from moe_lab.data import cached, prepare
from moe_lab.errors import ConfigError, DataError


@pytest.fixture(autouse=True)
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache and a temporary folder of the test's own; the working directory is elsewhere."""
    monkeypatch.setenv("MOE_LAB_CACHE", str(tmp_path / "cache"))
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path


def visible(folder: Path) -> list[Path]:
    return sorted(p for p in folder.iterdir() if not p.name.startswith("."))


def test_made_once(places: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = places / "a.txt"
    text.write_text("words " * 1000)
    first = cached(text)
    assert visible(places / "cache/tokens") == [first.path]
    monkeypatch.setattr(cache_module, "prepare", None)  # a second preparation would fail
    assert cached(text) == cached(str(text)) == first
    (places / "copy.txt").write_text("words " * 1000)
    assert cached(places / "copy.txt") == first  # the content counts, not the name


def test_content_and_settings_make_the_key(places: Path) -> None:
    text = places / "a.txt"
    text.write_text("words and more " * 1000)
    folders = {cached(text).path, cached(text, tokenizer="byte", vocab_size=256).path}
    assert len(folders) == 1
    folders |= {cached(text, val_fraction=0.1).path, cached(text, tokenizer="bpe", vocab_size=280).path}
    text.write_text("words and other " * 1000)
    folders |= {cached(text).path}
    assert len(folders) == 4
    with pytest.raises(ConfigError):
        cached(text, val_fraction=2)


def test_shipped_text_from_anywhere(places: Path) -> None:
    folder = cached("data/kjv.txt")
    assert folder.count("train") == 4_083_329
    assert folder.count("val") == 214_912


def test_working_directory_comes_first(places: Path) -> None:
    (places / "work/data").mkdir()
    (places / "work/data/kjv.txt").write_text("mine " * 100)
    assert cached("data/kjv.txt").count("train") < 1000


def test_missing_source_names_both_places(places: Path) -> None:
    with pytest.raises(DataError) as caught:
        cached("data/none.txt")
    root = Path(cache_module.__file__).parents[2]
    assert str(places / "work/data/none.txt") in str(caught.value)
    assert str(root / "data/none.txt") in str(caught.value)
    with pytest.raises(DataError, match=r"/none/at/all\.txt"):
        cached("/none/at/all.txt")


def test_prepared_folder_is_used_as_it_is(places: Path) -> None:
    (places / "a.txt").write_text("words " * 1000)
    folder = prepare([places / "a.txt"], places / "work/tokens")
    assert cached("tokens", val_fraction=0.5).info == folder.info
    assert not (places / "cache").exists()
    (places / "work/tokens/tokens.json").unlink()
    with pytest.raises(DataError, match=r"tokens\.json"):
        cached("tokens")


def test_folder_of_texts(places: Path) -> None:
    (places / "work/texts").mkdir()
    for name in "ab":
        (places / f"work/texts/{name}.txt").write_text(f"{name} words " * 100)
    assert cached("texts").info["splits"]["train"]["documents"] == 2


@pytest.mark.parametrize("cache", ["/proc/none", "a.txt/below"])
def test_cache_that_cannot_be_written(places: Path, monkeypatch: pytest.MonkeyPatch, cache: str) -> None:
    text = places / "a.txt"
    text.write_text("words " * 1000)
    monkeypatch.setenv("MOE_LAB_CACHE", str(places / cache))
    folder = cached(text)
    assert folder.path.is_relative_to(places / "tmp")
    assert cached(text).path == folder.path
    assert (places / f"tmp/moe_lab-{os.getuid()}").stat().st_mode & 0o777 == 0o700


def test_read_only_cache_that_already_holds_it(places: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = places / "a.txt"
    text.write_text("words " * 1000)
    folder = cached(text)

    def read_only(*_: object) -> Path:
        raise AssertionError("nothing had to be written")

    monkeypatch.setattr(cache_module, "_writable_parent", read_only)
    assert cached(text).path == folder.path


def test_temporary_folder_of_someone_else_is_not_trusted(
    places: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = places / "a.txt"
    text.write_text("words " * 1000)
    monkeypatch.setenv("MOE_LAB_CACHE", "/proc/none")
    theirs = places / f"tmp/moe_lab-{os.getuid()}"
    theirs.mkdir()
    theirs.chmod(0o777)
    with pytest.raises(DataError, match="MOE_LAB_CACHE"):
        cached(text)
    theirs.rmdir()
    theirs.symlink_to(places / "work")
    with pytest.raises(DataError, match="MOE_LAB_CACHE"):
        cached(text)
    assert visible(places / "work") == []


def test_damaged_copy_says_what_to_remove(places: Path) -> None:
    text = places / "a.txt"
    text.write_text("words " * 1000)
    folder = cached(text)
    (folder.path / "train.bin").write_bytes(b"x")
    with pytest.raises(DataError, match=f"remove {folder.path}"):
        cached(text)


def test_bad_source_leaves_an_empty_cache(places: Path) -> None:
    (places / "a.txt").write_bytes(b"\0")
    with pytest.raises(DataError, match="binary"):
        cached(places / "a.txt")
    assert visible(places / "cache/tokens") == []


@pytest.mark.parametrize("locks", [True, False])
def test_several_processes_at_once(places: Path, locks: bool) -> None:
    """With locks one prepares and the others wait; without them all prepare, and one result stays."""
    (places / "a.txt").write_text("words " * 200_000)
    code = """
import sys, time
from moe_lab.data import ByteTokenizer, cached
import fcntl
if sys.argv[2] == "False":
    def no_locks(*_): raise OSError(95, "not supported")
    fcntl.flock = no_locks
encode = ByteTokenizer.encode_batch
def slow(self, texts):
    print("prepared", end=" ")
    time.sleep(0.5)
    return encode(self, texts)
ByteTokenizer.encode_batch = slow
sys.stdin.readline()
print(cached(sys.argv[1]).path)
"""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(places / "a.txt"), str(locks)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(3 if locks else 2)
    ]
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    results = [process.communicate(timeout=60)[0].split() for process in processes]
    assert {process.returncode for process in processes} == {0}
    assert len({result[-1] for result in results}) == 1
    if locks:
        assert sum(len(result) - 1 for result in results) == 1
    assert visible(places / "cache/tokens") == [Path(results[0][-1])]
    assert not list((places / "cache/tokens").glob(".*.tmp"))
