"""The first notebook as a job: short in the fast set, at its full laptop scale among the slow tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from moe_lab.launch.job import run_notebook
from moe_lab.records import RunRecord

NOTEBOOK = Path(__file__).resolve().parent.parent / "notebooks" / "00_start_here.ipynb"


def run(out: Path, **parameters: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The job's record, and the metrics of its training run."""
    folder = run_notebook(NOTEBOOK, parameters, out=out, timeout_s=900, show=False)
    (training,) = (p.parent for p in folder.glob("*/metrics.jsonl"))
    return RunRecord.open(folder).read(), RunRecord.open(training).metrics()


def test_a_short_run(tmp_path: Path) -> None:
    record, rows = run(tmp_path, ranks=2, steps=20)
    assert record["status"] == "done"
    results = record["results"]
    assert results["parameters_total"] == 2_038_272
    assert results["repeats_to_the_bit"] is True
    assert results["final validation loss"] == rows[-1]["eval/CE loss"]
    assert rows[-1]["train/CE loss"] < rows[0]["train/CE loss"] - 1
    assert [row["step"] for row in rows] == list(range(1, 21))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_laptop_run_learns_and_repeats_to_the_bit(tmp_path: Path) -> None:
    record, rows = run(tmp_path / "first")
    results = record["results"]
    assert results["final validation loss"] < 1.70
    assert results["final validation loss"] < results["baselines"]["trigram counts"]
    assert results["below trigram"] is True
    assert record["parameters"]["ranks"] == 4
    _, again = run(tmp_path / "second")
    assert [r["train/CE loss"] for r in rows] == [r["train/CE loss"] for r in again]
    assert [r["optim/total grad norm"] for r in rows] == [r["optim/total grad norm"] for r in again]
    assert rows[-1]["eval/CE loss"] == again[-1]["eval/CE loss"]
