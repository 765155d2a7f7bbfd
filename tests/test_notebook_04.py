"""Lesson 04: it runs on real ranks, its equalities hold, and its folded solutions work."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import nbformat
import pytest

from moe_lab import checks, sim
from moe_lab.launch.job import NotebookError, run_notebook

NOTEBOOK = Path(__file__).parents[1] / "notebooks" / "04_data_parallel.ipynb"
FIGURES = {
    "ring", "ring-bytes", "buckets", "ready", "ledger", "layouts", "groups-wrong", "traffic", "explore", "published",
    "accumulation", "mesh",
}  # fmt: skip


def run(folder: Path, parameters: dict[str, Any] | None = None) -> Path:
    """Execute the lesson as a job and return its folder."""
    return run_notebook(NOTEBOOK, parameters, out=folder, timeout_s=280, show=False)


def results_of(folder: Path) -> dict[str, Any]:
    record = json.loads((folder / "record.json").read_text())
    assert record["status"] == "done"
    return record["results"]


def check_what_holds_anywhere(found: dict[str, Any]) -> None:
    """Equalities and counts that the lesson claims; times are never judged."""
    ring = found["ring"]
    assert ring["ring"] == pytest.approx([2 * (n - 1) / n for n in ring["ranks"]])
    assert ring["collected by rank 0"] == [n - 1 for n in ring["ranks"]]
    assert found["mean_instead_of_sum"] > 0.01
    assert found["reducer"]["slots_vs_autograd"] < 1e-5
    assert found["reducer"]["buckets"] < found["reducer"]["parameters"]
    assert found["a5_furthest"] < 0.01
    assert found["a5_gib_ep8"] == pytest.approx(106.8, abs=0.1)  # 114.7 GB, as the closed form has it
    assert found["bytes_vs_formula"] < 0.01
    assert found["equal"]["losses"] < 1e-9
    assert found["equal"]["norms"] < 1e-9
    assert found["fsdp_gb_a_microbatch"] == pytest.approx(328, abs=1)
    assert found["gb_per_second_that_explains"] == pytest.approx(620, abs=1)

    fullest, whole = found["a6"]["fullest"], found["a6"]["replicated"]
    assert found["a6"]["degrees"] == [2, 4, 7, 8, 13, 128]
    assert max(fullest["concatenate, then shard"]) < 1.001
    assert fullest["equal tensor count"][-1] > 4
    cut = dict(zip(found["a6"]["degrees"], whole["each tensor into D shards"]))
    assert cut[13] > cut[7] > 90
    assert max(cut[d] for d in (2, 4, 8, 128)) < 0.1

    one, copies = found["a7"]["from_one_process"], found["a7"]["between_copies"]
    right, *wrong = one
    assert right == "copies, summed (right)"
    assert max(one[right]) < 1e-12
    assert all(one[rule][-1] > 0.01 for rule in wrong)
    assert max(copies[right]) == max(copies["copies, averaged"]) == 0
    assert copies["EP group, averaged"][-1] > 0.01
    assert copies["last microbatch only"][-1] > 0.01


def check_traffic(found: dict[str, Any], microbatches: list[int]) -> None:
    sent = found["bytes_a_step"]
    assert sent["microbatches"] == microbatches
    assert len(set(sent["ddp"])) == 1
    assert sent["fsdp"] == [m * sent["fsdp"][0] for m in microbatches]
    assert sent["fsdp"][0] > sent["ddp"][0]
    for rates in found["a4_tokens_per_second"].values():
        assert all(len(values) == len(microbatches) and min(values) > 0 for values in rates.values())


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Fewer ranks and microbatches than the lesson's own, and other sizes."""
    parameters = {
        "ranks": 2, "ranks_sweep": [1], "microbatches": [2, 1], "steps": 1, "experts": 8, "seed": 7,
        "data_parallel": ["ddp", "fsdp"],
    }  # fmt: skip
    return run(tmp_path_factory.mktemp("runs"), parameters)


def test_the_lesson_holds_on_two_ranks(small):
    found = results_of(small)
    check_what_holds_anywhere(found)
    check_traffic(found, [1, 2])
    assert found["a4_clear"] is None, "one timed step says nothing about chance"
    assert set(found["a5_bytes_a_parameter"]) == {"ddp on 1", "ddp on 2", "fsdp on 2"}


def test_the_executed_notebook_has_its_figures_texts_and_open_exercises(small):
    (path,) = small.glob("*.ipynb")
    cells = {cell.id: cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"}
    figures = {
        name: sum("image/png" in output.get("data", {}) for output in cell.outputs)
        for name, cell in cells.items()
    }
    assert {name for name, number in figures.items() if number} == FIGURES
    assert set(figures.values()) <= {0, 1}, "a figure is shown twice"
    printed = {
        name: "".join(output.get("text", "") for output in cell.outputs if output.output_type == "stream")
        for name, cell in cells.items()
    }
    assert sum("exercise not attempted" in text for text in printed.values()) == 2
    assert printed["exercise-state-check"].count("exercise not attempted") == 2
    assert re.search(r"19B parameters on 8 ranks, 32 microbatches .* times as much", printed["explore"])
    widgets = [
        output
        for output in cells["explore"].outputs
        if "application/vnd.jupyter.widget-view+json" in output.get("data", {})
    ]
    assert len(widgets) == 1


@pytest.mark.slow
def test_the_lesson_at_laptop_scale(tmp_path):
    found = results_of(run(tmp_path))
    check_what_holds_anywhere(found)
    check_traffic(found, [1, 2, 4])
    assert set(found["a4_tokens_per_second"]) == {"2", "4"}
    assert set(found["a4_tokens_per_second"]["4"]) == {"ddp", "replicated", "fsdp", "hsdp"}


@pytest.mark.parametrize(
    ("exercise", "function", "check"),
    [
        ("exercise-ring", "ring_all_reduce", checks.check_ring_all_reduce),
        ("exercise-state", "shard_bounds", checks.check_shard_bounds),
        ("exercise-state", "bytes_per_parameter", checks.check_bytes_per_parameter),
    ],
)
def test_the_folded_solution_of_an_exercise_passes_its_check(exercise, function, check):
    cells = {cell.id: cell.source for cell in nbformat.read(NOTEBOOK, as_version=4).cells}
    solution = cells[f"{exercise}-solution"]
    assert solution.startswith("<details>")
    assert f"`{function}(" in cells[exercise], "the text of the exercise names the function"
    assert re.search(rf"def {function}\(.*\):\s+raise NotImplementedError", cells[f"{exercise}-check"])
    (code,) = re.findall(r"```python\n(.*?)```", solution, re.DOTALL)
    scope: dict = {}
    exec("import torch\n" + code, scope)
    assert check(scope[function]) is True


def naive(tensors, wire):
    total = tensors[0].clone()
    for rank in range(1, len(tensors)):
        total = total + wire.send(rank, 0, tensors[rank])
    return [total] + [wire.send(0, rank, total) for rank in range(1, len(tensors))]


def all_around(tensors, wire):
    """Right sums over the right links, but whole tensors go around."""
    n = len(tensors)
    totals, travelling = [t.clone() for t in tensors], list(tensors)
    for _ in range(n - 1):
        travelling = [wire.send((r - 1) % n, r, travelling[(r - 1) % n]) for r in range(n)]
        totals = [a + b for a, b in zip(totals, travelling)]
    return totals


@pytest.mark.parametrize(
    ("check", "function", "message"),
    [
        (checks.check_ring_all_reduce, naive, "sent to rank 0, but its right neighbour is rank"),
        (checks.check_ring_all_reduce, all_around, "bytes, but a ring sends"),
        (checks.check_ring_all_reduce, lambda t, w: sim.all_reduce(t), "rank 0 sent 0 bytes"),
        (checks.check_ring_all_reduce, lambda t, w: t, "values of what rank 0 holds differ"),
        (checks.check_ring_all_reduce, lambda t, w: t[0], "must return a list of 2 tensors"),
        (checks.check_shard_bounds, lambda s, n, r: (0, sum(s)), "rank 0 owns 0:256, but must own 0:64"),
        (checks.check_shard_bounds, lambda s, n, r: 0, "must return the pair"),
        (checks.check_bytes_per_parameter, lambda dp, ep: (18, 18), "look at the dense parameters"),
        (
            checks.check_bytes_per_parameter,
            lambda dp, ep: (6 + 12 / dp, 6 / ep + 12 / dp * ep),
            "look at the expert parameters",
        ),
    ],
)
def test_a_wrong_solution_is_told_what_differs(check, function, message, capsys):
    assert check(function) is False
    assert message in capsys.readouterr().out


def test_a_stub_is_not_attempted(capsys):
    def stub(*_):
        raise NotImplementedError

    for check in (checks.check_ring_all_reduce, checks.check_shard_bounds, checks.check_bytes_per_parameter):
        assert check(stub) is False
    assert capsys.readouterr().out.count("exercise not attempted") == 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"ranks": 1}, "ranks is 1 (at least 2)"),
        ({"data_parallel": ["ddp", "zero"]}, "must hold ddp and fsdp"),
        ({"microbatches": [0, 1]}, "microbatches [0, 1]"),
        ({"experts": 1}, "top_k is 2, but there are only 1 experts"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_runs(tmp_path, parameters, message):
    with pytest.raises(NotebookError, match=re.escape(message)) as error:
        run(tmp_path, parameters)
    assert "ConfigError" in str(error.value)
