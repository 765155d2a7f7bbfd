"""Lesson 01: it runs at laptop scale and at other sizes, its numbers are right, and its folded solutions work."""

from __future__ import annotations

import json
import re
from pathlib import Path

import nbformat
import pytest

from moe_lab import checks
from moe_lab.launch.job import run_notebook

NOTEBOOK = Path(__file__).parents[1] / "notebooks" / "01_moe_layer.ipynb"
RULES = ("olmo", "unit_sum", "equal_mass", "width_proportional")


def results_of(folder: Path) -> dict:
    record = json.loads((folder / "record.json").read_text())
    assert record["status"] == "done"
    return record["results"]


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def check_what_holds_at_any_size(found: dict) -> None:
    """Equalities that the lesson claims, and the factors that the merge rules put before gradients."""
    assert max(found["loop_vs_transport"].values()) <= 1e-6
    assert set(found["loop_vs_transport"]) == {"output", "x", "router", "gate_up", "down"}
    assert len(found["hand_vs_package"]) == 7
    assert max(found["hand_vs_package"].values()) <= 1e-6
    assert found["router_gradient"] <= 1e-5
    assert found["balance"]["injected"] <= 1e-5

    assert found["pool_total"][-1] > 20 * found["pool_total"][0]
    assert found["pool_active"][-1] < 1.1 * found["pool_active"][0]

    assert max(found["e13_rounding"]["torch.float32"].values()) < 3e-6
    assert max(found["e13_rounding"]["torch.float64"].values()) < 5e-15
    *folded, two_gates = found["e13_gates"].values()
    assert max(folded) < 3e-6
    assert two_gates > 0.05

    routed, shared = found["e12_routed_gradient"], found["e12_shared_gradient"]
    for rule, r, s in zip(RULES, (1, 0.25, 0.125, 0.25 * 8 / 9), (1, 1, 0.5, 1 / 9)):
        assert routed[rule] == pytest.approx(r, rel=1e-3)
        assert shared[rule] == pytest.approx(s, rel=1e-3)


def check_against_the_report(found: dict, tolerance: float) -> None:
    """E12 in the report's setting up to its size; the tolerance covers the noise of few seeds."""
    forward = found["e12_forward"]
    assert found["e12_sum_p2_mean"] == pytest.approx(0.2589, abs=0.0015)
    assert mean(found["e12_shared_over_routed"]) == pytest.approx(0.5**0.5, abs=2 * tolerance)
    for rule, published in zip(RULES, (1.016, 0.411, 0.205, 0.216)):
        assert mean(forward[rule]["variance"]) ** 0.5 == pytest.approx(published, rel=tolerance)
        assert mean(forward[rule]["predicted"]) ** 0.5 == pytest.approx(published, rel=0.01)
    cosine = {rule: mean(forward[rule]["cosine"]) for rule in RULES}
    assert max(cosine, key=lambda rule: cosine[rule]) == "olmo"
    fixed, learning = (
        mean(found["e12_input_gradient"][name]) for name in ("router fixed", "router learning")
    )
    assert fixed == pytest.approx(1.016, abs=0.01)
    assert learning == pytest.approx(1.054, abs=0.015)
    assert learning > fixed + 0.02
    assert found["e12_sweep_worst_deviation"] < 2 * tolerance


def run(folder: Path, parameters: dict | None = None) -> Path:
    """Execute the lesson as a job and return its folder."""
    return run_notebook(NOTEBOOK, parameters, out=folder, timeout_s=240, show=False)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Other sizes than the lesson's own, odd ones, and the fewest seeds."""
    parameters = {
        "d_model": 32, "n_experts": 6, "top_k": 3, "expert_hidden": 40, "shared_hidden": 0, "tokens": 50,
        "trials": 1, "repeats": 1, "seed": 7,
    }  # fmt: skip
    return run(tmp_path_factory.mktemp("runs"), parameters)


def test_the_lesson_holds_at_another_size(small):
    found = results_of(small)
    check_what_holds_at_any_size(found)
    check_against_the_report(found, tolerance=0.02)
    assert found["e12_forward_setting"] == {
        "d": 256, "d_r": 256, "d_s": 128, "n": 48, "k": 4, "t": 256, "seeds": 1,
    }  # fmt: skip


def test_the_executed_notebook_has_its_figures_texts_and_open_exercises(small):
    (path,) = small.glob("*.ipynb")
    cells = {cell.id: cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"}
    figures = {
        name: sum("image/png" in output.get("data", {}) for output in cell.outputs)
        for name, cell in cells.items()
    }
    with_figure = {name for name, number in figures.items() if number}
    assert with_figure == {
        "tiny", "count", "gradient", "layouts", "merge-forward", "merge-backward-figure", "merge-sweep",
        "balance-load", "explore",
    }  # fmt: skip
    assert set(figures.values()) <= {0, 1}, "a figure is shown twice"
    printed = {
        name: "".join(output.get("text", "") for output in cell.outputs if output.output_type == "stream")
        for name, cell in cells.items()
    }
    open_exercises = [name for name in cells if name.startswith("exercise")]
    assert len(open_exercises) == 4
    assert all("exercise not attempted" in printed[name] for name in open_exercises)
    assert re.search(
        r"sharpness 1, top-3: mean sum of p\^2 0\.\d+ .* idle experts \d of 6", printed["explore"]
    )
    controls = [
        output
        for output in cells["explore"].outputs
        if "application/vnd.jupyter.widget-view+json" in output.get("data", {})
    ]
    assert len(controls) == 1


@pytest.mark.slow
def test_the_lesson_at_laptop_scale_measures_what_the_report_says(tmp_path):
    found = results_of(run(tmp_path))
    check_what_holds_at_any_size(found)
    check_against_the_report(found, tolerance=0.01)


@pytest.mark.parametrize(
    ("exercise", "function", "check"),
    [
        ("exercise-route", "top_k_route", checks.check_top_k_route),
        ("exercise-permute", "permute_rows", checks.check_permute_rows),
        ("exercise-merge", "merge_weights", checks.check_merge_weights),
        ("exercise-balance", "balance", checks.check_balance_loss),
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


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"top_k": 9}, "top_k is 9, but there are only 8 experts"),
        ({"tokens": 0}, "tokens 0"),
        ({"device": "cuda:7"}, "cuda:7"),
    ],
)
@pytest.mark.slow
def test_sizes_that_cannot_work_are_refused_before_anything_is_computed(tmp_path, parameters, message):
    from moe_lab.launch.job import NotebookError

    with pytest.raises(NotebookError, match=re.escape(message)) as error:
        run(tmp_path, parameters)
    assert "ConfigError" in str(error.value)
