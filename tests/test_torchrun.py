"""``moe-lab train`` under torchrun, alone, resumed; ranks that do not meet; two jobs on one machine at a time."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_train import TINY

from moe_lab import launch, presets
from moe_lab.fields import override, to_dict
from moe_lab.records import RunRecord
from moe_lab.train import fit_ranks, latest

# eval and samples at the end are the whole validation split: nothing here needs a long one.
SETTINGS = [
    f"{'n_experts' if name == 'experts' else name}={value}"
    for name, value in {**TINY, "eval_every": 0}.items()
]
LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def start(command: list[str], **variables: str) -> subprocess.Popen[str]:
    """A command in a session of its own, so that whatever it leaves behind can be found."""
    environment = {k: v for k, v in os.environ.items() if k not in LAUNCHERS}
    environment |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **variables}
    return subprocess.Popen(
        [sys.executable, "-m", *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
        start_new_session=True,
    )  # fmt: skip


def train(out: Path, *settings: str, **variables: str) -> subprocess.Popen[str]:
    return start(
        ["moe_lab.cli", "train", "--preset", "laptop", "--out", str(out), *SETTINGS, *settings], **variables
    )


def torchrun(out: Path, *settings: str, ranks: int = 2, options: tuple[str, ...] = ("--standalone",)) -> Any:
    return start(
        ["torch.distributed.run", "--nproc-per-node", str(ranks), *options, "-m", "moe_lab.cli", "train", "--preset", "laptop",
         "--out", str(out), *SETTINGS, *settings],
    )  # fmt: skip


def finish(process: subprocess.Popen[str], timeout: float = 120) -> tuple[int, str, str]:
    """Exit status, output and errors; nothing that the command started may be left."""
    try:
        output, errors = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    deadline = time.monotonic() + 5
    while left := members(process.pid):
        assert time.monotonic() < deadline, f"left behind: {left}"
        time.sleep(0.05)
    return process.returncode, output, errors


def members(session: int) -> list[int]:
    """Living processes of a session."""
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == session and fields[0] != "Z":
            found.append(int(folder.name))
    return found


def numbers(folder: Path) -> list[tuple[float, float]]:
    return [(r["train/CE loss"], r["optim/total grad norm"]) for r in RunRecord(folder).metrics()]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def taken_port() -> Iterator[int]:
    """A port that a server which speaks something else listens on."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield int(server.getsockname()[1])


def test_two_jobs_at_once_under_torchrun_equal_launch_run(tmp_path: Path) -> None:
    jobs = [torchrun(tmp_path / "a"), torchrun(tmp_path / "b", "lr=2e-3")]
    for status, output, errors in map(finish, jobs):
        assert status == 0, errors
        assert output.count("result: ") == 1
    for name, changes in (("c", []), ("d", ["lr=2e-3"])):
        config = override(presets.get("laptop"), [*SETTINGS, *changes])
        launch.run(
            fit_ranks, ranks=2, threads=1, timeout_s=120, show=False, config=to_dict(config),
            folder=str(tmp_path / name),
        )  # fmt: skip
    a, b, c, d = (numbers(tmp_path / name) for name in "abcd")
    assert len(a) == 6
    assert a == c
    assert b == d
    assert a != b
    assert RunRecord.open(tmp_path / "a").read()["layout"]["ranks"] == 2


LAUNCHED = """
import sys
from moe_lab import launch, presets
from moe_lab.fields import to_dict, override
from moe_lab.train import fit_ranks
config = override(presets.get("laptop"), sys.argv[2:])
launch.run(fit_ranks, ranks=2, threads=1, timeout_s=120, show=False, config=to_dict(config), folder=sys.argv[1])
"""


@pytest.mark.slow
def test_two_jobs_at_once_through_launch_run(tmp_path: Path) -> None:
    jobs = []
    for name, rate in (("a", "1e-3"), ("b", "2e-3")):
        command = [sys.executable, "-c", LAUNCHED, str(tmp_path / name), *SETTINGS, f"lr={rate}"]
        jobs.append(subprocess.Popen(command, stderr=subprocess.PIPE, text=True))
    for job in jobs:
        assert job.communicate(timeout=120)[1] == "" or job.returncode == 0
        assert job.returncode == 0
    a, b = numbers(tmp_path / "a"), numbers(tmp_path / "b")
    assert len(a) == len(b) == 6
    assert a[0] == b[0]  # the same weights and data, a different rate from the first update on
    assert a[1:] != b[1:]


def test_killed_and_resumed_from_the_command_line(tmp_path: Path) -> None:
    """One process, no launcher, SIGKILL whenever it comes: what follows is what would have followed."""
    every = ("checkpoint_every=5", "steps=2000", "log_every=1", "schedule=constant")
    killed = train(tmp_path / "run", *every)
    deadline = time.monotonic() + 60
    while latest(tmp_path / "run") is None:
        assert killed.poll() is None, killed.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    killed.kill()
    killed.communicate()
    before = numbers(tmp_path / "run")
    steps = len(before) + 6
    resumed = train(tmp_path / "run", *every, f"steps={steps}", "--resume", "auto")
    status, output, errors = finish(resumed)
    assert status == 0, errors
    assert "goes on after step" in output
    whole = train(tmp_path / "whole", *every, "checkpoint_every=0", f"steps={steps}")
    assert finish(whole)[0] == 0
    assert numbers(tmp_path / "run") == numbers(tmp_path / "whole")
    assert [r["step"] for r in RunRecord(tmp_path / "run").metrics()] == list(range(1, steps + 1))
    assert numbers(tmp_path / "run")[: len(before)] == before


@pytest.mark.slow
def test_torchrun_resumes_on_more_ranks(tmp_path: Path) -> None:
    whole = ("checkpoint_every=2", "schedule=constant")
    assert finish(train(tmp_path / "run", *whole, "steps=4"))[0] == 0
    status, _, errors = finish(torchrun(tmp_path / "run", *whole, "--resume", "auto"))
    assert status == 0, errors
    assert finish(train(tmp_path / "one", *whole))[0] == 0
    for a, b in zip(numbers(tmp_path / "run"), numbers(tmp_path / "one"), strict=True):
        assert a == pytest.approx(b, rel=1e-5)


def sentence(errors: str) -> str:
    """The one line that the command wrote; what torch's C++ logs beside it (with its own stack) is not ours."""
    assert "Traceback" not in errors, errors
    torchs = ("[", "Exception raised from", "frame #", "<omitting", " ")
    lines = [line for line in errors.splitlines() if line and not line.startswith(torchs)]
    assert len(lines) == 1, errors
    return lines[0]


def alone(out: Path, rank: int, port: int, *options: str) -> subprocess.Popen[str]:
    """One rank of two, started by hand as a scheduler does."""
    return train(
        out, *options, "--timeout", "3", RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )  # fmt: skip


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_missing_rank_ends_within_the_time_limit(tmp_path: Path, rank: int) -> None:
    started = time.monotonic()
    status, _, errors = finish(alone(tmp_path / "run", rank, free_port()))
    assert status == 1
    text = sentence(errors)
    assert text.startswith(f"rank {rank} of 2 could not join: the others did not come to 127.0.0.1:")
    assert "within 3 s: start all 2 ranks" in text
    assert time.monotonic() - started < 30
    assert not (tmp_path / "run").exists()


def test_a_port_in_use(tmp_path: Path, taken_port: int) -> None:
    first, second = alone(tmp_path / "run", 0, taken_port), alone(tmp_path / "run", 1, taken_port)
    (status_0, _, errors_0), (status_1, _, errors_1) = finish(first), finish(second)
    assert (status_0, status_1) == (1, 1)
    assert f"127.0.0.1:{taken_port} is in use by another program" in sentence(errors_0)
    assert sentence(errors_1).startswith("rank 1 of 2 could not join: ")
    assert not (tmp_path / "run").exists()


def test_wrong_world_sizes_are_refused(tmp_path: Path) -> None:
    jobs = [torchrun(tmp_path / "a", "dp=3"), torchrun(tmp_path / "b", ranks=3)]
    words = (
        "ParallelConfig has pp 1 x dp 3 = 3 ranks, but 2 are running",
        "a step has 4 microbatches (8 sequences in microbatches of 2), which 3 data-parallel ranks do not share evenly",
    )
    for job, text in zip(jobs, words):
        status, _, errors = finish(job)
        assert status != 0
        assert text in errors
    assert not list(tmp_path.iterdir())


def test_a_half_set_environment_and_bad_options_are_refused(tmp_path: Path) -> None:
    jobs = [
        train(tmp_path / "run", RANK="0"),
        train(tmp_path / "run", "--timeout", "0"),
        train(tmp_path / "run", "--resume", "auto"),
        start(["moe_lab.cli", "train", "--preset", "laptop", "--resume", "auto"]),
    ]
    words = (
        "only RANK of RANK and WORLD_SIZE is set",
        "--timeout is 0.0 seconds, but must be above 0",
        "holds no checkpoint to go on from",
        "--resume auto goes on with the run in --out DIR, but --out is not given",
    )
    for job, text in zip(jobs, words):
        status, _, errors = finish(job)
        assert status == 2
        assert text in sentence(errors)
    assert not list(tmp_path.iterdir())
