"""Notebook jobs: parameters are checked before anything starts, and every way a run can end leaves a true record."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_lab.errors import ConfigError, DataError
from moe_lab.launch.job import GRACE_S, SAVE_S, NotebookError, run_notebook
from moe_lab.launch.notebook import cell_titles
from moe_lab.launch.parameters import declared, describe, read_notebook, resolve
from moe_lab.records import RUN_DIR_VARIABLE, RunRecord

PARAMETERS = """\
from typing import Literal, Optional
ranks: int = 4  # processes on this machine
lr: float = 1e-3
# what the activations are stored in
precision: Literal["fp32", "bf16"] = "fp32"
resume: bool = False
sizes: list[int] = [8, 16]
grid: list[list[int]] = [[1, 2], [3]]
note: str | None = None
limit: Optional[float] = None
seconds = 60 * 60
steps = 100
layers = ["a", "b"]
long: str = (
    "x"  # a comment that a formatter
)
"""


def notebook(
    path: Path, *cells: str, parameters: str | None = "steps: int = 3", kernel: str = "python3"
) -> Path:
    """A notebook file: a ``parameters`` cell, then ``cells``; ``# ...`` starts a code cell, ``md:`` a text cell."""
    made = []
    for index, text in enumerate([*([] if parameters is None else [parameters]), *cells]):
        tags = ["parameters"] if index == 0 and parameters is not None else []
        tags += ["raises-exception"] if "# expected" in text else []
        cell: dict[str, Any] = {
            "id": f"cell{index}",
            "metadata": {"tags": tags},
            "source": text.removeprefix("md:"),
        }
        if text.startswith("md:"):
            made.append({"cell_type": "markdown", **cell})
        else:
            made.append({"cell_type": "code", "outputs": [], "execution_count": None, **cell})
    kernelspec = {"name": kernel, "display_name": kernel, "language": "python"}
    path.write_text(
        json.dumps(
            {"nbformat": 4, "nbformat_minor": 5, "metadata": {"kernelspec": kernelspec}, "cells": made}
        )
    )
    return path


def runs_of(folder: Path) -> list[psutil.Process]:
    """Processes that belong to a run under ``folder``."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(RUN_DIR_VARIABLE, "").startswith(str(folder)):
                found.append(process)
        except psutil.Error:
            continue
    return found


def outputs(folder: Path) -> str:
    """Every output of the executed notebook, as one text."""
    cells = json.loads((folder / "notebook.ipynb").read_text())["cells"]
    return json.dumps([cell.get("outputs") for cell in cells])


def known(text: str = PARAMETERS) -> dict[str, Any]:
    """The parameters that a cell with ``text`` declares."""
    cell = {"cell_type": "code", "source": text, "metadata": {"tags": ["parameters"]}}
    return declared({"cells": [cell]}, "x.ipynb")


# Parameters


def test_a_parameters_cell_is_read_with_types_defaults_and_comments() -> None:
    found = known()
    assert list(found) == [
        "ranks",
        "lr",
        "precision",
        "resume",
        "sizes",
        "grid",
        "note",
        "limit",
        "seconds",
        "steps",
        "layers",
        "long",
    ]
    assert found["long"].help == "a comment that a formatter"
    assert (found["ranks"].type_name, found["ranks"].default, found["ranks"].help) == (
        "int",
        4,
        "processes on this machine",
    )
    assert found["precision"].help == "what the activations are stored in"
    assert found["steps"].type_name == "int"
    assert found["layers"].type_name == "list[str]"
    assert (found["seconds"].default, found["seconds"].type_name) == ("60 * 60", "Any")
    text = describe(found, "x.ipynb")
    assert "ranks" in text
    assert "processes on this machine" in text
    assert "1e-3" in text or "0.001" in text


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("ranks", "2", 2),
        ("lr", "1e-3", 1e-3),
        ("lr", "2", 2.0),
        ("precision", "bf16", "bf16"),
        ("resume", "true", True),
        ("resume", "False", False),
        ("sizes", "[1, 2]", [1, 2]),
        ("sizes", "1,2", [1, 2]),
        ("grid", "[[1], [2, 3]]", [[1], [2, 3]]),
        ("note", "none", None),
        ("note", "7", "7"),
        ("limit", "null", None),
        ("limit", "1.5", 1.5),
        ("seconds", "10", 10),
        ("steps", "5", 5),
        ("layers", '["x"]', ["x"]),
        ("layers", "x,y", ["x", "y"]),
        ("lr", 2, 2.0),
        ("sizes", (1, 2), [1, 2]),
        ("limit", None, None),
    ],
)
def test_a_value_takes_the_declared_type(name: str, text: object, value: object) -> None:
    resolved = resolve(known(), {name: text}, "x.ipynb")[name]
    assert resolved == value
    assert type(resolved) is type(value)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("ranks", "4.5", "wants int"),
        ("ranks", "true", "wants int"),
        ("ranks", True, "wants int"),
        ("ranks", 2.0, "wants int"),
        ("lr", "fast", "1e-3"),
        ("lr", "nan", "wants float"),
        ("precision", "fp8", "one of 'fp32', 'bf16'"),
        ("resume", "yes", "true or false"),
        ("resume", 1, "true or false"),
        ("sizes", "[1, 2.5]", "list\\[int\\]"),
        ("sizes", '["1"]', "list\\[int\\]"),
        ("sizes", "[1,", "JSON list"),
        ("grid", "[1, 2]", "list\\[list\\[int\\]\\]"),
        ("limit", "often", "float.* or None"),
        ("steps", "1e2", "wants int"),
        ("note", 3, "str"),
    ],
)
def test_a_wrong_type_is_one_sentence_that_names_the_parameter(
    name: str, value: object, message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        resolve(known(), {name: value}, "x.ipynb")
    assert f"'{name}' of x.ipynb" in str(caught.value)
    assert repr(value) in str(caught.value)


def test_an_unknown_name_lists_what_exists_and_suggests_the_closest() -> None:
    with pytest.raises(
        ConfigError, match=r"no parameter 'rank' \(did you mean 'ranks'\?\).*ranks, lr, precision"
    ):
        resolve(known(), {"rank": "2"}, "x.ipynb")


def test_a_parameter_without_a_default_has_to_be_passed() -> None:
    found = known("corpus: str")
    with pytest.raises(ConfigError, match=r"'corpus' of x\.ipynb has no default"):
        resolve(found, {}, "x.ipynb")
    assert resolve(found, {"corpus": "a.txt"}, "x.ipynb") == {"corpus": "a.txt"}


def test_an_annotation_that_a_job_cannot_pass_says_so() -> None:
    with pytest.raises(ConfigError, match="wants Path, which a job cannot pass"):
        resolve(known("place: Path = None"), {"place": "x"}, "x.ipynb")


@given(st.integers(), st.floats(allow_nan=False), st.booleans(), st.lists(st.integers()), st.text(min_size=1))
def test_every_value_survives_its_own_text(i: int, f: float, b: bool, many: list[int], s: str) -> None:
    found = known("i: int = 0\nf: float = 0.0\nb: bool = True\nmany: list[int] = []\ns: str = ''")
    text = {"i": str(i), "f": repr(f), "b": str(b).lower(), "many": json.dumps(many), "s": s}
    assert resolve(found, text, "x.ipynb") == {"i": i, "f": f, "b": b, "many": many, "s": s}


@given(st.text(), st.sampled_from(list(known())))
def test_any_text_becomes_a_value_or_one_configuration_error(text: str, name: str) -> None:
    with contextlib.suppress(ConfigError):
        resolved = resolve(known(), {name: text}, "x.ipynb")
        assert list(resolved) == [name]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "there is no notebook"),
        ("not json", "not JSON"),
        ("[1]", "not a notebook"),
        ('{"a": 1}', "not a notebook"),
        ('{"nbformat": 3, "worksheets": []}', "format 3"),
        ('{"nbformat": 4}', "no list of cells"),
        ('{"nbformat": 4, "cells": [{"cell_type": "code", "metadata": {}}]}', "cell 1 has no proper source"),
        ('{"nbformat": 4, "cells": []}', "no cell tagged 'parameters'"),
    ],
)
def test_a_file_that_is_no_notebook_starts_nothing(tmp_path: Path, content: str | None, message: str) -> None:
    path = tmp_path / "n.ipynb"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=message):
        run_notebook(path, out=tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


def test_a_misspelt_notebook_gets_a_suggestion(tmp_path: Path) -> None:
    notebook(tmp_path / "lesson.ipynb")
    with pytest.raises(ConfigError, match=r"did you mean .*lesson\.ipynb"):
        read_notebook(tmp_path / "lessn.ipynb")


@pytest.mark.parametrize(
    "parameters", ["unknown", "wrong", "none", "two", "markdown", "magic", "executed", "time"]
)
def test_parameters_that_cannot_be_used_write_nothing(tmp_path: Path, parameters: str) -> None:
    path = notebook(tmp_path / "n.ipynb", "1")
    document = json.loads(path.read_text())
    given: dict[str, object] = {}
    cells = document["cells"]
    if parameters == "unknown":
        given = {"stepz": 1}
    elif parameters == "wrong":
        given = {"steps": "many"}
    elif parameters == "none":
        cells[0]["metadata"] = {}
    elif parameters == "two":
        cells[1]["metadata"] = {"tags": ["parameters"]}
    elif parameters == "markdown":
        cells[0]["cell_type"] = "markdown"
    elif parameters == "magic":
        cells[0]["source"] = "%matplotlib inline"
    elif parameters == "executed":
        cells[1]["metadata"] = {"tags": ["injected-parameters"]}
    path.write_text(json.dumps(document))
    with pytest.raises(ConfigError) as caught:
        run_notebook(path, given, out=tmp_path / "runs", timeout_s=-1 if parameters == "time" else None)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_status == 2
    assert not (tmp_path / "runs").exists()


def test_a_folder_that_cannot_be_written_starts_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    monkeypatch.setattr(subprocess, "Popen", lambda *a, **k: pytest.fail("something was started"))
    with pytest.raises(DataError, match="cannot write the run folder") as caught:
        run_notebook(notebook(tmp_path / "n.ipynb"), out=blocked)
    assert caught.value.exit_status == 2


def test_a_cell_is_called_by_its_comment_or_the_heading_before_it() -> None:
    cells = [
        {"cell_type": "markdown", "source": "# Lesson\ntext\n## Train a model\nmore"},
        {"cell_type": "code", "source": "train()"},
        {"cell_type": "code", "source": "# Draw the loss\nplot()"},
        {"cell_type": "code", "source": "  "},
    ]
    assert cell_titles(cells) == [None, "Train a model", "Draw the loss", None]
    assert cell_titles([{"cell_type": "code", "source": "\nx = 1\ny = 2"}]) == ["x = 1"]


# Runs

WORK = """\
import os, sys
import matplotlib.pyplot as plt
from moe_lab import records
plt.plot([1, 2])
plt.show()
print("steps", steps, "in", os.getcwd(), "with", sys.executable)
records.record(loss=1.25, steps=steps, curve=[3, 2, 1])
"""


def test_a_run_keeps_the_notebook_and_the_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "Agg")  # a caller's backend must not cost the notebook its figures
    path = notebook(
        tmp_path / "a {b}.ipynb", "md:## Work", WORK, "1/0  # expected", kernel="somebody-elses-kernel"
    )
    folder = run_notebook(path, {"steps": "7"}, out="runs")
    record = RunRecord.open(folder).read()
    assert (record["status"], record["kind"], record["name"]) == ("done", "notebook", "a_b_")
    assert record["parameters"] == {"steps": 7}
    assert record["results"] == {"loss": 1.25, "steps": 7, "curve": [3, 2, 1]}
    assert record["error"] is None
    assert record["seconds"] > 0
    text = outputs(folder)
    assert f"steps 7 in {tmp_path} with {sys.executable}" in text
    assert "image/png" in text
    assert "ZeroDivisionError" in text
    assert "papermill-error" not in (folder / "notebook.ipynb").read_text()
    shown = capsys.readouterr().out
    assert "[3/4] Work" in shown
    assert f"{folder}/notebook.ipynb" in shown
    assert "loss   1.25" in shown
    assert "curve" not in shown
    assert not runs_of(folder.resolve())
    assert sorted(p.name for p in folder.iterdir() if not p.name.startswith(".")) == [
        "notebook.ipynb",
        "record.json",
    ]


def test_a_failing_cell_is_named_and_its_error_comes_last(tmp_path: Path) -> None:
    path = notebook(tmp_path / "n.ipynb", "# Break it\nraise ValueError('boom')", "print('never')")
    with pytest.raises(NotebookError) as caught:
        run_notebook(path, out=tmp_path, show=False)
    assert caught.value.exit_status == 1
    assert str(caught.value).splitlines()[-1] == "ValueError: boom"
    record = RunRecord.open(caught.value.folder).read()
    assert record["status"] == "failed"
    assert record["error"] == {"type": "ValueError", "message": "boom", "where": "cell 2 of 3 (Break it)"}
    assert "never" not in outputs(caught.value.folder)


def test_a_kernel_that_dies_is_138(tmp_path: Path) -> None:
    path = notebook(
        tmp_path / "n.ipynb",
        "print('kept', flush=True)",
        "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)",
    )
    with pytest.raises(NotebookError, match="kernel died in cell 3 of 3") as caught:
        run_notebook(path, out=tmp_path, show=False)
    assert caught.value.exit_status == 138
    assert RunRecord.open(caught.value.folder).read()["error"]["type"] == "KernelDied"
    assert "kept" in outputs(caught.value.folder)


CHILD = "import subprocess, time\nsubprocess.Popen(['sleep', '600'], start_new_session=True)\nprint('kept', flush=True)\n"
HANG = CHILD + "time.sleep(600)"
STUBBORN = "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n" + HANG


def test_the_time_limit_ends_the_run_and_everything_it_started(tmp_path: Path) -> None:
    started = time.monotonic()
    with pytest.raises(NotebookError, match="time limit of 4 s") as caught:
        run_notebook(notebook(tmp_path / "n.ipynb", HANG), out=tmp_path, timeout_s=4, show=False)
    assert time.monotonic() - started < 4 + GRACE_S + SAVE_S + 5
    assert caught.value.exit_status == 124
    assert RunRecord.open(caught.value.folder).read()["status"] == "timeout"
    assert not runs_of(caught.value.folder)


def start(path: Path, out: Path) -> subprocess.Popen[str]:
    """``moe-lab run`` as a process of its own, returned once its second cell runs."""
    process = subprocess.Popen(
        [sys.executable, "-m", "moe_lab.cli", "run", str(path), "--out", str(out)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if any("kept" in file.read_text() for file in out.glob("*/notebook.ipynb")):
            return process
        time.sleep(0.1)
    process.kill()
    raise AssertionError(f"the second cell never ran: {process.communicate()}")


def quiet(text: str) -> str:
    """``text`` without its print: an earlier cell's print is in the saved notebook once this one runs."""
    return text.replace("print('kept', flush=True)\n", "")


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_ends_the_run_and_everything_it_started(
    tmp_path: Path, number: signal.Signals, status: int
) -> None:
    process = start(notebook(tmp_path / "n.ipynb", "print('kept')", quiet(HANG)), tmp_path / "runs")
    process.send_signal(number)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == status, errors
    (folder,) = (tmp_path / "runs").iterdir()
    record = RunRecord.open(folder).read()
    assert record["status"] == "killed"
    assert number.name in record["error"]["message"]
    assert number.name in errors
    assert "Traceback" not in errors
    assert not runs_of(folder)


@pytest.mark.slow
def test_a_kernel_that_ignores_the_interrupt_is_killed_and_its_output_kept(tmp_path: Path) -> None:
    with pytest.raises(NotebookError, match="time limit of 20 s in cell 2 of 2") as caught:
        run_notebook(notebook(tmp_path / "n.ipynb", STUBBORN), out=tmp_path, timeout_s=20, show=False)
    assert caught.value.status == "timeout"
    assert "kept" in outputs(caught.value.folder)
    assert not runs_of(caught.value.folder)


LONG = """\
# Train
import time
from IPython.display import Markdown, display
for step in range(45):
    print("step", step, flush=True)
    time.sleep(0.1)
display(Markdown("between"))
print("after")
"""


def test_a_long_cell_is_heard_of_while_it_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = run_notebook(notebook(tmp_path / "n.ipynb", LONG), out=tmp_path)
    lines = capsys.readouterr().out.splitlines()
    assert 2 <= sum(line.startswith("    step ") for line in lines) <= 4
    assert (
        sum(line.startswith("[2/2] Train") for line in lines) == 2
    )  # when it starts, and again with its seconds
    made = json.loads((folder / "notebook.ipynb").read_text())["cells"][1]["outputs"]
    assert [output["output_type"] for output in made] == ["stream", "display_data", "stream"]
    assert made[2]["text"] == ["after\n"]


@pytest.mark.slow
def test_a_second_signal_does_not_wait(tmp_path: Path) -> None:
    process = start(notebook(tmp_path / "n.ipynb", "print('kept')", quiet(STUBBORN)), tmp_path / "runs")
    started = time.monotonic()
    process.send_signal(signal.SIGTERM)
    time.sleep(0.5)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=20)
    assert time.monotonic() - started < 4
    (folder,) = (tmp_path / "runs").iterdir()
    assert RunRecord.open(folder).read()["status"] == "killed"
    assert not runs_of(folder)


@pytest.mark.slow
def test_a_runner_that_is_killed_takes_its_kernel_along(tmp_path: Path) -> None:
    process = start(
        notebook(tmp_path / "n.ipynb", "print('kept')", "import time\ntime.sleep(600)"), tmp_path / "runs"
    )
    (folder,) = (tmp_path / "runs").iterdir()
    assert runs_of(folder)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate(timeout=20)
    deadline = time.monotonic() + 15
    while runs_of(folder) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not runs_of(folder)
    assert RunRecord.open(folder).read()["status"] == "running"  # nobody was left to write more


@pytest.mark.slow
def test_jobs_started_together_all_get_their_kernel(tmp_path: Path) -> None:
    path = notebook(tmp_path / "n.ipynb", "print('kept')")
    processes = [start(path, tmp_path / str(index)) for index in range(4)]
    for process in processes:
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors


@pytest.mark.slow
def test_a_job_inside_a_job_lands_in_its_folder(tmp_path: Path) -> None:
    inner = notebook(tmp_path / "inner.ipynb", "from moe_lab.records import record\nrecord(value=2)")
    cell = f"from moe_lab.launch.job import run_notebook\nrun_notebook({str(inner)!r}, show=False)"
    folder = run_notebook(notebook(tmp_path / "outer.ipynb", cell), out=tmp_path / "runs", show=False)
    (nested,) = [p.parent for p in folder.glob("*/record.json")]
    assert RunRecord.open(nested).read()["results"] == {"value": 2}
    assert RunRecord.open(folder).read()["results"] == {}
