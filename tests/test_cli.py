"""The command line: help with examples, one sentence for an error, and JSON with nothing beside it."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from moe_lab import cli
from moe_lab.errors import DataError
from moe_lab.records import RunRecord

COMMANDS = (
    ["run"],
    ["train"],
    ["data"],
    ["data", "prepare"],
    ["import"],
    ["export"],
    ["results"],
    ["doctor"],
)


def moe_lab(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run the command as a user does."""
    command = [sys.executable, "-m", "moe_lab.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, timeout=120)


def test_help_answers_at_once() -> None:
    best = min(_seconds("--help") for _ in range(5))
    assert best < 0.3


def _seconds(*arguments: str) -> float:
    started = time.perf_counter()
    assert moe_lab(*arguments).returncode == 0
    return time.perf_counter() - started


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_has_help_with_an_example(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        cli.main([*command, "--help"])
    text = capsys.readouterr().out
    assert left.value.code == 0
    assert "example" in text
    assert f"moe-lab {command[0]}" in text.partition("example")[2]


@pytest.mark.parametrize("command", [[], ["data"]], ids=["nothing", "data"])
def test_a_command_without_its_subcommand_shows_the_help(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(command) == 2
    assert "example" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["rnu"], "did you mean 'run'?"),
        (["frobnicate"], "Commands: run, train, data, import, export, results, doctor"),
        (["run"], "NOTEBOOK; see 'moe-lab run --help'"),
        (["run", "x.ipynb", "-p", "ranks"], "expected 2 arguments"),
        (["run", "x.ipynb", "--timeout", "soon"], "soon"),
        (["train"], "--preset"),
        (["data", "prepare", "x.txt"], "--out"),
    ],
)
def test_a_wrong_command_line_is_one_sentence(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        cli.main(arguments)
    captured = capsys.readouterr()
    assert left.value.code == 2
    assert message in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""


@pytest.mark.parametrize(
    "arguments",
    [
        ["run", "absent.ipynb"],
        ["run", "absent.ipynb", "--help-parameters"],
        ["results", "absent"],
        ["data", "prepare", "absent.txt", "--out", "out"],
        ["data", "prepare", "absent.txt", "--out", "out", "--val-fraction", "2"],
        ["train", "--preset", "latpop"],
        ["import", "absent", "--out", "out"],
        ["export", "absent", "--out", "out"],
        ["train", "--preset", "laptop", "optim.lrr=1"],
    ],
    ids=" ".join,
)
def test_bad_input_is_the_message_alone_and_status_2(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_a_ctrl_c_is_130(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def interrupted(self: RunRecord) -> None:
        raise KeyboardInterrupt

    RunRecord.create(tmp_path / "run", kind="train", name="x")
    monkeypatch.setattr(RunRecord, "read", interrupted)
    assert cli.main(["results", str(tmp_path)]) == 130
    assert capsys.readouterr().err == "interrupted\n"


@pytest.mark.parametrize("value", ["-1", "-1e-3", "-.5", "-inf"])
def test_negative_numbers_are_values(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from moe_lab.launch import job

    seen = {}

    def run_notebook(notebook: str, parameters: dict[str, str], **rest: object) -> Path:
        seen.update(parameters)
        raise DataError("far enough")

    monkeypatch.setattr(job, "run_notebook", run_notebook)
    assert cli.main(["run", "x.ipynb", "-p", "bias", value]) == 2
    assert seen == {"bias": value}


def test_train_passes_preset_settings_and_folder_on(monkeypatch: pytest.MonkeyPatch) -> None:
    from moe_lab import train

    calls = []
    monkeypatch.setattr(train, "cli_train", lambda *arguments: calls.append(arguments) or 0)
    assert cli.main(["train", "--preset", "laptop", "--out", "here", "steps=3", "optim.lr=1e-3"]) == 0
    assert [call[:3] for call in calls] == [("laptop", ["steps=3", "optim.lr=1e-3"], "here")]


def test_settings_stand_anywhere_on_the_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from moe_lab import train

    calls = []
    monkeypatch.setattr(train, "cli_train", lambda *arguments: calls.append(arguments) or 0)
    for line in (
        "a=1 --preset laptop --out here b=2 c=3",
        "--preset laptop a=1 --out here b=2 --timeout 5 c=3",
    ):
        assert cli.main(["train", *line.split()]) == 0
    assert [call[:3] for call in calls] == [("laptop", ["a=1", "b=2", "c=3"], "here")] * 2
    with pytest.raises(SystemExit):
        cli.main(["train", "--preset", "laptop", "--wrong", "a=1"])
    with pytest.raises(SystemExit):
        cli.main(["results", "here", "there"])
    assert "unrecognized arguments: there" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "given"),
    [
        (["import", "hf", "--out", "ours", "--json"], ("hf", "ours", True)),
        (["export", "ours", "--out", "hf", "--architecture", "mixtral"], ("ours", "hf", "mixtral", False)),
    ],
    ids=["import", "export"],
)
def test_checkpoints_go_in_and_out(
    command: list[str], given: tuple[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    from moe_lab import interop

    calls = []
    monkeypatch.setattr(interop, f"cli_{command[0]}", lambda *arguments: calls.append(arguments) or 0)
    assert cli.main(command) == 0
    assert calls == [given]


NOTEBOOK = {
    "nbformat": 4,
    "nbformat_minor": 5,
    "metadata": {},
    "cells": [
        {
            "id": "a", "cell_type": "code", "metadata": {"tags": ["parameters"]}, "outputs": [], "execution_count": None,
            "source": ["steps: int = 3  # optimizer steps\n", "fail: bool = False"],
        },
        {
            "id": "b", "cell_type": "code", "metadata": {}, "outputs": [], "execution_count": None,
            "source": "from moe_lab import records\nrecords.record(loss=0.5 * steps)\nassert not fail, 'as asked'",
        },
    ],
}  # fmt: skip


def test_run_and_results(tmp_path: Path) -> None:
    (tmp_path / "n.ipynb").write_text(json.dumps(NOTEBOOK))
    listed = moe_lab("run", "n.ipynb", "--help-parameters", cwd=tmp_path)
    assert "steps" in listed.stdout
    assert "optimizer steps" in listed.stdout
    done = moe_lab("run", "n.ipynb", "-p", "steps", "4", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].split() == ["loss", "2"]
    assert done.stderr == ""
    failed = moe_lab("run", "n.ipynb", "-p", "fail", "true", "--json", cwd=tmp_path)
    assert failed.returncode == 1
    assert json.loads(failed.stdout)["status"] == "failed"
    assert failed.stderr.splitlines()[-1] == "AssertionError: as asked"

    lines = moe_lab("results", cwd=tmp_path).stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["done", "failed"]
    assert "loss 2" in lines[0]
    records = json.loads(moe_lab("results", "runs", "--json", cwd=tmp_path).stdout)
    assert [record["results"] for record in records] == [{"loss": 2.0}, {"loss": 1.5}]


def test_results_of_running_and_damaged_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    RunRecord.create(tmp_path / "going", kind="train", name="laptop")
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "record.json").write_text("{")
    assert cli.main(["results", str(tmp_path)]) == 1
    captured = capsys.readouterr()
    assert captured.out.startswith("running")
    assert "bad/record.json" in captured.err


def test_results_of_an_empty_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["results", str(tmp_path)]) == 0
    assert "no runs" in capsys.readouterr().out


def test_data_prepare(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.txt").write_text("In the beginning was a short text. " * 20)
    out = tmp_path / "tokens"
    assert cli.main(["data", "prepare", str(tmp_path / "a.txt"), "--out", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["vocab_size"] == 256
    assert (out / "train.bin").exists()
    assert cli.main(["data", "prepare", str(tmp_path / "a.txt"), "--out", str(out)]) == 2
