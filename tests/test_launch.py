"""Ranks from a notebook: results, surroundings, and above all what happens when something goes wrong."""

from __future__ import annotations

import functools
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import launch_targets as targets
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_lab import launch
from moe_lab.errors import ConfigError, LaunchError, RankError, RankTimeout
from moe_lab.launch import beats, client, diagnose, files
from moe_lab.launch import target as launch_target

HERE = Path(__file__).parent
MARKER = "MOE_LAB_TEST_MARKER"


@pytest.fixture(autouse=True)
def _temporary_folders_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


@pytest.fixture(autouse=True, scope="session")
def _warm_agent() -> None:
    launch.run(targets.nothing, ranks=1)  # the time limits below are about ranks, not about importing torch


def run4(fn: Any, **arguments: Any) -> list[dict[str, Any]]:
    return launch.run(fn, **{"ranks": 4, "timeout_s": 20, "threads": 1, **arguments})


def works_again() -> bool:
    """Whether a plain call succeeds now, with nothing of the call before it left running."""
    assert not children(client._agent.pid if client._agent else -1)
    return [result["sum"] for result in run4(targets.total)] == [6.0] * 4


def children(pid: int) -> list[int]:
    path = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(child) for child in path.read_text().split()] if path.exists() else []


def marked(marker: str) -> list[str]:
    """Command lines of all processes, in any session, that were started with ``marker`` in their environment."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if f"{MARKER}={marker}".encode() in (process / "environ").read_bytes():
                found.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:  # it ended in the meantime
            continue
    return found


def gone(marker: str, within_s: float = 5) -> bool:
    limit = time.monotonic() + within_s
    while time.monotonic() < limit and marked(marker):
        time.sleep(0.05)
    return not marked(marker)


def kernel(code: str, marker: str) -> subprocess.Popen[str]:
    """A process of its own that uses the launcher, as a notebook kernel does."""
    head = f"import sys; sys.path.insert(0, {str(HERE)!r}); from moe_lab import launch; import launch_targets as targets\n"
    return subprocess.Popen(
        [sys.executable, "-c", head + code],
        env={**os.environ, MARKER: marker, "TMPDIR": tempfile.gettempdir()},
        stdout=subprocess.PIPE,
        text=True,
    )


# Results and surroundings


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_results_come_back_in_rank_order(ranks: int) -> None:
    expected = 0.5 * sum(range(ranks))
    results = launch.run(targets.total, ranks=ranks, threads=1, scale=0.5)
    assert results == [{"sum": expected, "rank": rank, "world": ranks} for rank in range(ranks)]


def test_a_name_works_like_the_function_and_none_is_an_empty_dict() -> None:
    assert launch.run("launch_targets:nothing", ranks=2) == [{}, {}]


def test_arguments_and_results_survive_the_way() -> None:
    arguments = {
        "text": "ä\n" * 500_000,
        "nothing": None,
        "nested": {"list": [1, 2.5, True]},
        "big": 2**80,
        "inf": float("inf"),
    }
    assert launch.run(targets.echo, ranks=1, **arguments, pair=(1, 2)) == [{**arguments, "pair": [1, 2]}]


def test_ranks_see_the_callers_surroundings_and_not_an_outer_launcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch.run(targets.nothing, ranks=1)  # the agent is warm; what follows changes after it started
    monkeypatch.chdir(tmp_path)
    for name, value in {
        "RANK": "7",
        "WORLD_SIZE": "99",
        "LOCAL_RANK": "7",
        "MASTER_PORT": "1",
        "TORCHELASTIC_RUN_ID": "x",
    }.items():
        monkeypatch.setenv(name, value)
    results = launch.run(targets.about, ranks=2, threads=3, env={MARKER: "from env"})
    for rank, seen in enumerate(results):
        port = seen["launcher"].pop("MASTER_PORT")
        assert port != "1"
        assert seen["launcher"] == {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0",
            "MASTER_ADDR": "127.0.0.1",
        }  # fmt: skip
        assert seen["elastic"] == []
        assert (seen["marker"], seen["directory"], seen["threads"], seen["stdin"]) == (
            "from env",
            str(tmp_path),
            3,
            "",
        )
        assert seen["made_group"] is False
    # Copies of one process, yet not of its random state; torch keeps its fixed default seed.
    assert results[0]["random"] != results[1]["random"]
    assert results[0]["numpy"] != results[1]["numpy"]
    assert results[0]["torch_seed"] == results[1]["torch_seed"]


def test_the_agent_stays_warm_single_threaded_and_away_from_cuda() -> None:
    first, second = (launch.run(targets.about, ranks=1, backend="gloo")[0] for _ in range(2))
    assert first["parent"] == second["parent"]
    assert os.listdir(f"/proc/{first['parent']}/task") == [str(first["parent"])]
    assert first["cuda"] is False
    code = "import sys, moe_lab.launch; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_warm_call_takes_well_under_a_second() -> None:
    seconds = []
    for _ in range(5):
        start = time.monotonic()
        run4(targets.total)
        seconds.append(time.monotonic() - start)
    assert min(seconds) < 0.6, seconds


def test_ranks_import_files_as_they_are_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    for version in (
        1,
        22,
    ):  # of different length, since Python's own cache looks at whole seconds and the length
        (tmp_path / "written_by_a_cell.py").write_text(f"def f():\n    return {{'version': {version}}}\n")
        assert launch.run("written_by_a_cell:f", ranks=1) == [{"version": version}]


def test_rank_0_is_shown_while_it_runs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    times: list[tuple[float, str]] = []
    output = SimpleNamespace(write=lambda text: times.append((time.monotonic(), text)), flush=lambda: None)
    monkeypatch.setattr(sys, "stdout", output)
    launch.run(targets.talk, ranks=2, pause_s=0.4)
    end = time.monotonic()
    monkeypatch.undo()
    text = "".join(part for _, part in times)
    assert text == "".join(f"rank 0 says {line} äöü\n" for line in range(3)) + "and ends without a newline\n"
    assert end - times[0][0] > 0.7, "the first line came only at the end"
    launch.run(targets.talk, ranks=2, show=False)
    assert capsys.readouterr().out == ""


def test_files_are_kept_where_asked_and_removed_otherwise(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "run"
    for ranks in (3, 2):
        launch.run(targets.talk, ranks=ranks, run_dir=folder, show=False)
        assert sorted(p.name for p in folder.glob("rank*.json")) == [
            f"rank{rank}.json" for rank in range(ranks)
        ]
    assert "rank 1 says 2" in (folder / "rank1.log").read_text()
    assert json.loads((folder / "rank1.json").read_text())["result"] == {}
    launch.run(targets.nothing, ranks=1)
    assert [path.name for path in tmp_path.iterdir()] == ["deep"]


def test_children_that_ranks_leave_behind_are_ended() -> None:
    child = launch.run(targets.leaves_children_behind, ranks=1)[0]["child"]
    assert not Path(f"/proc/{child}").exists()


def test_the_agent_outlives_the_thread_that_started_it() -> None:
    launch.shutdown()
    first: list[dict[str, Any]] = []
    starter = threading.Thread(target=lambda: first.extend(launch.run(targets.about, ranks=1)))
    starter.start()
    starter.join()
    time.sleep(0.2)
    assert launch.run(targets.about, ranks=1)[0]["parent"] == first[0]["parent"]


def test_two_threads_take_turns() -> None:
    results: list[Any] = []
    threads = [threading.Thread(target=lambda: results.extend(run4(targets.total))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [result["sum"] for result in results] == [6.0] * 8


def test_two_kernels_at_once_do_not_meet() -> None:
    code = "for i in range(6): print(*(r['sum'] for r in launch.run(targets.total, ranks=3, scale={scale})))"
    kernels = [kernel(code.format(scale=scale), f"pair{os.getpid()}") for scale in (1, 10)]
    outputs = [process.communicate(timeout=60)[0] for process in kernels]
    assert outputs == ["3 3 3\n" * 6, "30 30 30\n" * 6]
    assert gone(f"pair{os.getpid()}")


def test_from_a_notebook(tmp_path: Path) -> None:
    nbformat = pytest.importorskip("nbformat")
    from nbclient import NotebookClient

    v4 = nbformat.v4
    cells = [
        f"import os, sys\nos.environ[{MARKER!r}] = 'notebook{os.getpid()}'\nsys.path.insert(0, {str(HERE)!r})\nfrom moe_lab import launch",
        "launch.run('launch_targets:talk', ranks=2)",
        "def f(): pass\ntry:\n    launch.run(f, ranks=2)\nexcept Exception as error:\n    print(type(error).__name__, error)",
    ]
    notebook = v4.new_notebook(cells=[v4.new_code_cell(cell) for cell in cells])
    NotebookClient(
        notebook, kernel_name="python3", timeout=60, resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    shown = "".join(output.get("text", "") for output in notebook.cells[1].outputs)
    assert shown.startswith("rank 0 says 0 äöü\nrank 0 says 1 äöü\n")
    refusal = notebook.cells[2].outputs[0].text
    assert refusal.startswith("ConfigError f is defined in a notebook cell")
    assert "%%writefile my_ranks.py" in refusal
    assert gone(f"notebook{os.getpid()}")


# What is refused before anything starts


class Holder:
    def method(self) -> None:
        pass


def inner() -> Any:
    return lambda: None


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"fn": lambda: None}, "is a lambda"),
        ({"fn": inner()}, "is a lambda"),
        ({"fn": Holder().method}, "Holder.method"),
        ({"fn": functools.partial(targets.total)}, "functools.partial"),
        ({"fn": 3}, "got a int: 3"),
        ({"fn": "no_colon"}, "'no_colon' names no function"),
        ({"fn": "__main__:f"}, "move it to a file"),
        ({"ranks": 0}, "ranks must be a whole number of at least 1, but is 0"),
        ({"ranks": 2.0}, "but is 2.0"),
        ({"ranks": True}, "but is True"),
        ({"threads": 0}, "threads must be"),
        ({"timeout_s": 0}, "timeout_s must be a number of seconds above 0, but is 0"),
        ({"timeout_s": float("nan")}, "but is nan"),
        ({"backend": "mpi"}, "backend must be one of auto, gloo, nccl"),
        ({"env": {"A": 1}}, "env maps names to text"),
        ({"scale": object()}, "argument scale is a object"),
        ({"fn": targets.echo, "paths": [Path("a")]}, r"argument paths\[0\] is a PosixPath.*use str"),
        (
            {"fn": targets.echo, "map": {"a": {1: 2}}},
            r"argument map\['a'\] has the key 1, but keys must be text",
        ),
        ({"sclae": 1}, "cannot be called with these arguments: got an unexpected keyword argument 'sclae'"),
        ({"run_dir": __file__ + "/x"}, "run_dir .* cannot be written: Not a directory"),
    ],
)
def test_bad_input_is_refused_in_one_sentence(
    arguments: dict[str, Any], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "warm_agent", lambda: pytest.fail("something was started"))
    call = {"fn": targets.total, "ranks": 2, **arguments}
    with pytest.raises(ConfigError, match=says) as caught:
        launch.run(call.pop("fn"), **call)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inside: st.lists(inside) | st.dictionaries(st.text(), inside),
    max_leaves=20,
)


@given(json_values)
def test_what_passes_the_check_crosses_unchanged(value: Any) -> None:
    assert files.not_json(value, "value") is None
    assert json.loads(json.dumps(value)) == value


@given(json_values, st.lists(st.integers(0, 3) | st.text(max_size=3), max_size=4))
def test_the_place_of_a_bad_value_is_named(value: Any, path: list[int | str]) -> None:
    bad: Any = object()
    for key in reversed(path):
        bad = {key: bad} if isinstance(key, str) else [value] * key + [bad]
    name = "value" + "".join(f"[{key!r}]" for key in path)
    assert (files.not_json(bad, "value") or "").startswith(f"{name} is a object")


@given(st.text())
def test_heartbeats_survive_any_label(label: str) -> None:
    with tempfile.NamedTemporaryFile() as file:
        beats.start(file.name)
        try:
            launch.heartbeat("an earlier and much longer label " * 3)
            launch.heartbeat(label)
            beat = beats.read(file.name)
        finally:
            os.close(beats._file or -1)
            beats._file = None
        assert beat is not None
        assert abs(beat.time - time.time()) < 5
        assert " ".join(label.split())[:20].startswith(beat.label[:20].rstrip("\ufffd"))
        assert os.path.getsize(file.name) == beats.WIDTH


def test_heartbeat_outside_ranks_does_nothing() -> None:
    launch.heartbeat("nobody listens")
    assert beats.read("/nonexistent") is None


# Failures. After each of them a second call works and nothing is left


@pytest.mark.parametrize(
    ("fn", "arguments", "rank", "says"),
    [
        (targets.boom, {}, 2, r"rank 2 of 4: ValueError: boom \(launch_targets.py:\d+\)"),
        (targets.all_boom, {}, None, r"rank \d of 4: ValueError: boom everywhere \(launch_targets.py:\d+\)"),
        (targets.killed, {}, 2, r"rank 2 of 4 was killed by signal 9 \(SIGKILL\), last at 'about to reduce'; .* memory"),
        (targets.killed, {"number": signal.SIGTERM}, 2, r"rank 2 of 4 was killed by signal 15 \(SIGTERM\)"),
        (targets.leaves, {}, 1, r"rank 1 of 4 ended with exit status 3 before it returned a result"),
        (targets.leaves, {"status": 0}, 1, r"rank 1 of 4 ended with exit status 0 before it returned a result"),
        (targets.calls_exit, {}, None, r"rank \d of 4: SystemExit: 0"),
        (targets.segfaults, {}, None, r"rank \d of 4 was killed by signal 11 \(SIGSEGV\)"),
        (targets.own_timeout, {}, 1, r"rank 1 of 4: RuntimeError: Timed out waiting 30ms for the reader"),
        (targets.returns_tensor, {}, None, r"result\['loss'\] is a Tensor.*use .tolist\(\)"),
        (targets.returns_list, {}, None, r"returned a list, but ranks return a dict"),
        ("no_such_module:f", {}, None, r"could not import no_such_module:f: ModuleNotFoundError: No module named 'no_such_module'"),
        ("launch_targets:no_such", {}, None, r"could not import .* has no attribute 'no_such'"),
        (targets.total, {"scale": "x"}, None, r"rank \d of 4: "),
    ],
)  # fmt: skip
def test_the_rank_that_failed_is_named(
    fn: Any, arguments: dict[str, Any], rank: int | None, says: str
) -> None:
    start = time.monotonic()
    with pytest.raises(RankError, match=says) as caught:
        run4(fn, show=False, **arguments)
    assert time.monotonic() - start < 5, "a failure must not wait for any time limit"
    assert rank is None or caught.value.rank == rank
    headline = str(caught.value).splitlines()[0]
    assert "Connection" not in headline
    log = Path(caught.value.log or "")
    assert log.name == f"rank{caught.value.rank}.log"
    assert log.exists()
    assert works_again()


def test_a_failure_carries_its_traceback_and_the_ranks_last_words() -> None:
    with pytest.raises(RankError) as caught:
        run4(targets.boom, show=False)
    text = str(caught.value)
    assert "before the failure" in text
    assert 'raise ValueError("boom")' in text
    assert "worker.py" not in text
    assert "Traceback" in Path(caught.value.log or "").read_text()
    assert caught.value.exit_code == 1


def test_a_module_that_cannot_be_imported_is_shown_at_its_own_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "broken_inside.py").write_text("x = 1\nimport no_such_dependency\n")
    (tmp_path / "broken_syntax.py").write_text("def f(:\n    pass\n")
    with pytest.raises(
        RankError, match=r"could not import broken_inside:f: ModuleNotFoundError: .* \(broken_inside.py:2\)"
    ):
        run4("broken_inside:f")
    with pytest.raises(
        RankError, match=r"could not import broken_syntax:f: SyntaxError: .* \(broken_syntax.py:1\)"
    ):
        run4("broken_syntax:f")


@pytest.mark.parametrize(
    ("fn", "arguments", "silent", "says"),
    [
        (targets.sleeps, {"rank": 1}, [1],
         r"rank 1 of 4 was silent for \d+\.\d s, last at 'step 2', now in sleeps \(launch_targets.py:\d+\); "
         r"ranks 0, 2, 3 waited for 3.2 s in a collective"),
        (targets.sleeps_beside_subgroup, {}, [1], r"rank 1 of 4 was silent .*; rank 0 waited for 3.2 s in a collective"),
        (targets.sleeps_at_the_end, {"rank": 3, "timeout_s": 2}, [3],
         r"rank 3 of 4 was silent .* last at 'the last step', now in sleeps_at_the_end \(.*\); the call's 2 s are over"),
        (targets.works_on, {"seconds": 60, "timeout_s": 1}, [0, 1, 2, 3],
         r"all 4 ranks were still at work when the call's 1 s were over .*'grinding'.*allow more with timeout_s"),
        (targets.returns_early, {"rank": 1}, [1],
         r"ranks 0, 2, 3 of 4 waited 3.2 s in a collective that rank 1, which had already returned, never joined"),
        (targets.different_collectives, {"ranks": 2}, [0, 1],
         r"ranks 0, 1 of 2 waited 3.2 s in collectives that do not match \(rank 0 at launch_targets.py:\d+; rank 1 at"),
        pytest.param(targets.spins_in_c, {"rank": 0}, [0], r"rank 0 of 4 was silent .* in spins_in_c", marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_the_rank_that_hangs_is_named(
    fn: Any, arguments: dict[str, Any], silent: list[int], says: str
) -> None:
    start = time.monotonic()
    with pytest.raises(RankTimeout, match=says) as caught:
        run4(fn, **{"timeout_s": 4, **arguments})
    assert time.monotonic() - start < 10
    assert caught.value.silent == silent
    folder = Path(re.findall(r"stacks and logs are in (\S+)", str(caught.value))[0])
    if caught.value.silent != [1] or fn is not targets.returns_early:
        stacks = [(folder / f"rank{rank}.stack").read_text() for rank in silent]
        assert fn is targets.different_collectives or all(f"in {fn.__name__}" in stack for stack in stacks)
    assert works_again()


def test_an_interrupt_stops_the_ranks_and_goes_on() -> None:
    run4(targets.total)
    timer = threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        run4(targets.starts_processes)
    assert time.monotonic() - start < 4
    assert works_again()


def test_an_agent_that_is_killed_is_reported_and_replaced() -> None:
    run4(targets.total)
    agent = client._agent
    assert agent is not None
    timer = threading.Timer(1.0, os.kill, (agent.pid, signal.SIGKILL))
    timer.start()
    with pytest.raises(LaunchError, match=r"the launch agent ended .* the next call starts a new one"):
        run4(targets.sleeps, rank=0)
    assert works_again()


@pytest.mark.slow
def test_an_agent_that_died_between_two_calls_is_replaced_without_a_word() -> None:
    run4(targets.total)
    pid = client._agent.pid  # type: ignore[union-attr]
    os.kill(pid, signal.SIGKILL)
    while (
        "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    ):  # it has ended, and nobody has noticed yet
        time.sleep(0.01)
    assert works_again()


@pytest.mark.parametrize("number", [pytest.param(signal.SIGTERM, marks=pytest.mark.slow), signal.SIGKILL])
@pytest.mark.parametrize("stage", [pytest.param("starting", marks=pytest.mark.slow), "running"])
def test_nothing_outlives_the_kernel(number: int, stage: str) -> None:
    marker = f"{stage}{number}-{os.getpid()}"
    process = kernel(
        "print('here', flush=True)\nlaunch.run(targets.starts_processes, ranks=3, timeout_s=600)", marker
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "here\n"
    if stage == "running":
        assert process.stdout.readline() == "started\n"
        limit = time.monotonic() + 30
        while len(marked(marker)) < 2 + 3 * 3 and time.monotonic() < limit:  # two children a rank
            time.sleep(0.05)
        assert len(marked(marker)) == 2 + 3 * 3
    else:
        limit = time.monotonic() + 10
        while len(marked(marker)) < 2 and time.monotonic() < limit:
            time.sleep(0.02)
        time.sleep(0.3)
    process.send_signal(number)
    process.wait(10)
    assert gone(marker), marked(marker)
    process.stdout.close()


# GPUs


@pytest.mark.gpu
def test_forked_ranks_can_use_cuda() -> None:
    import torch

    devices = torch.cuda.device_count()
    for _ in range(2):
        (result,) = launch.run(targets.on_device, ranks=1)
        assert (result["device"], result["sums"]) == ("cuda:0", [4.0, 4.0])
        assert "nccl" in result["backend"]
    results = launch.run(targets.on_device, ranks=devices + 1)
    assert [r["device"] for r in results] == [f"cuda:{rank % devices}" for rank in range(devices + 1)]
    assert all(r["sums"] == [4.0 * len(results)] * 2 and r["backend"] == "gloo" for r in results)


@pytest.mark.multigpu
def test_the_rank_that_nccl_waits_for_is_named() -> None:
    with pytest.raises(RankTimeout, match="rank 1 of 2 was silent") as caught:
        launch.run(targets.sleeps_on_device, ranks=2, rank=1, timeout_s=40)
    assert caught.value.silent == [1]
    assert [r["sums"] for r in launch.run(targets.on_device, ranks=2)] == [[8.0, 8.0]] * 2


# Blame, from files alone


def left_behind(folder: Path, *ranks: dict[str, Any] | None) -> dict[str, Any]:
    """A call whose ranks reported what is given; None is a rank that reported nothing."""
    for rank, report in enumerate(ranks):
        files.rank_file(folder, rank, "log").touch()
        if report is not None:
            files.write_report(folder, rank, {"rank": rank, "phase": "run", "time": 100.0 + rank, **report})
    return {
        "run_dir": str(folder),
        "ranks": len(ranks),
        "target": "m:f",
        "timeout_s": 60,
        "group_timeout_s": 30,
        "started": 0.0,
    }


def raised(kind: str, message: str, **more: Any) -> dict[str, Any]:
    return {
        "ok": False,
        "error": {"type": kind, "message": message, "where": "f.py:3", "traceback": ""},
        **more,
    }


LOST = raised("RuntimeError", "[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:10628.")
WAITED = raised(
    "RuntimeError",
    "[gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 30000ms for recv operation to complete",
)
STORE = raised("torch.distributed.DistStoreError", "wait timeout after 30000ms, keys: /x")


def test_a_ranks_own_error_comes_before_those_that_follow_from_it(tmp_path: Path) -> None:
    call = left_behind(tmp_path, LOST, WAITED, raised("KeyError", "'x'", time=500.0), STORE)
    error = diagnose.failure(call, {"ended": "failed", "exits": {"3": -signal.SIGABRT}})
    assert isinstance(error, RankError)
    assert error.rank == 2
    assert str(error).startswith("rank 2 of 4: KeyError: 'x' (f.py:3)")


def test_a_death_comes_before_lost_connections(tmp_path: Path) -> None:
    call = left_behind(tmp_path, LOST, None, LOST, LOST)
    error = diagnose.failure(call, {"ended": "failed", "exits": {"1": -9, "0": 1}})
    assert isinstance(error, RankError)
    assert (error.rank, error.exit_code) == (1, -9)


@pytest.mark.parametrize(
    "victim",
    [
        raised(
            "torch.distributed.DistNetworkError",
            "Failed to recv, got 0 bytes. Connection was likely closed.",
            phase="join",
        ),
        raised(
            "RuntimeError",
            "Gloo connectFullMesh failed with [gloo/transport/tcp/pair.cc:553] Connection closed by peer",
            phase="join",
        ),
        raised("torch.distributed.DistBackendError", "NCCL error: words that no pattern knows"),
    ],
)
def test_a_death_explains_whatever_the_transport_says(tmp_path: Path, victim: dict[str, Any]) -> None:
    error = diagnose.failure(
        left_behind(tmp_path, victim, None, victim), {"ended": "failed", "exits": {"1": -11}}
    )
    assert isinstance(error, RankError)
    assert (error.rank, error.exit_code) == (1, -11)


def test_a_watchdogs_abort_does_not_hide_the_silent_rank(tmp_path: Path) -> None:
    call = left_behind(tmp_path, None, None, None, None)
    error = diagnose.failure(call, {"ended": "failed", "exits": {"0": -6, "1": -6, "3": -6}})
    assert isinstance(error, RankTimeout)
    assert error.silent == [2]


def test_a_peer_that_returned_early_is_named_whether_waited_for_or_lost(tmp_path: Path) -> None:
    done = {"ok": True, "result": {}}
    for victim, says in ((WAITED, "rank 0 of 2 waited 30 s"), (LOST, "rank 0 of 2 lost the connection")):
        error = diagnose.failure(left_behind(tmp_path, victim, done), {"ended": "failed", "exits": {"0": 1}})
        assert isinstance(error, RankTimeout)
        assert error.silent == [1]
        assert str(error).startswith(
            f"{says} in a collective that rank 1, which had already returned, never joined"
        )


def test_a_rank_aborted_by_itself_is_named(tmp_path: Path) -> None:
    call = left_behind(tmp_path, None, {"ok": True, "result": {}})
    error = diagnose.failure(call, {"ended": "failed", "exits": {"0": -6}})
    assert isinstance(error, RankError)
    assert (error.rank, error.exit_code) == (0, -6)
    assert "SIGABRT" in str(error)


# The same set-up without this launcher


def test_a_process_that_nobody_launched_is_a_world_of_one() -> None:
    outer = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run(
        [sys.executable, str(HERE / "launch_targets.py")],
        env=outer,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (
        done.stdout.splitlines() == ["made=True world=1 sum=1 device=cpu"] or "device=cuda:0" in done.stdout
    )
    half = subprocess.run(
        [sys.executable, str(HERE / "launch_targets.py")],
        env={**outer, "RANK": "0"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "only RANK of RANK and WORLD_SIZE is set" in half.stderr


@pytest.mark.slow
def test_under_torchrun() -> None:
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        str(HERE / "launch_targets.py"),
    ]
    done = subprocess.run(
        command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=120
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("made")]
    assert len(lines) == 2
    assert all(line.startswith("made=True world=2 sum=2") for line in lines), done.stderr


def test_reference_resolves_to_the_same_function() -> None:
    reference = launch_target.reference(targets.total, {})
    assert reference == "launch_targets:total"
    assert launch_target.resolve(reference) is targets.total
    with pytest.raises(TypeError, match="not a function"):
        launch_target.resolve("launch_targets:annotations.compiler_flag")
