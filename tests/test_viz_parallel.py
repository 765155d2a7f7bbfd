"""The figures of lesson 04: they show the values they are given, with labelled axes and the published values dashed."""

from __future__ import annotations

import math
import warnings

import matplotlib.pyplot as plt
import pytest

from moe_lab.viz import parallel
from moe_lab.viz.widgets import png

WAYS = ("DDP, optimizer sharded", "DDP, optimizer on every rank", "FSDP", "HSDP, shards over 2 ranks")


def draw(figure):
    """Render; a layout that does not fit is a warning, and so an error here."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert png(figure).startswith(b"\x89PNG")
    assert plt.get_fignums() == []
    return figure


def texts(ax):
    return [text.get_text() for text in ax.texts]


def title(ax):
    return ax.get_title(loc="left") or ax.get_title()


def legend(figure):
    return [text.get_text() for text in figure.legends[0].get_texts()]


@pytest.mark.parametrize("ranks", [2, 4])
def test_ring_has_a_panel_for_each_step_and_a_number_for_each_chunk(ranks):
    counts = [[[1 + state] * ranks for _ in range(ranks)] for state in range(2 * ranks - 1)]
    figure = draw(parallel.ring(counts))
    shown = [ax for ax in figure.axes if ax.get_visible()]
    assert len(shown) == 2 * ranks - 1
    assert [title(ax) for ax in shown][:2] == ["start", "reduce 1"]
    assert title(shown[-1]) == f"gather {ranks - 1}"
    assert texts(shown[1]) == ["2"] * ranks**2


def test_busiest_draws_both_and_the_limit():
    ax = draw(parallel.busiest([2, 4, 8], {"root": [1, 3, 7], "ring": [1, 1.5, 1.75]}, "m")).axes[0]
    assert [list(line.get_ydata()) for line in ax.lines[:2]] == [[1, 3, 7], [1, 1.5, 1.75]]
    assert ax.lines[2].get_linestyle() == "--"
    assert "2: the ring's limit" in texts(ax)


def test_buckets_have_a_rectangle_a_parameter_and_a_cut_between_shards():
    rows = [("0: expert", 2000, [(0, 1000, 1), (1000, 500, 0)]), ("1: dense", 1000, [(0, 1000, -1)])]
    figure = draw(parallel.buckets(rows, layers=2, ranks=4, message="m"))
    ax = figure.axes[0]
    widths = [round(patch.get_width(), 6) for patch in ax.patches]
    assert widths == [2.0, 1.0, 0.5, 1.0, 1.0]
    assert [line.get_xdata()[0] for line in ax.lines] == [0.5, 1.0, 1.5, 0.25, 0.5, 0.75]
    assert legend(figure) == ["embedding", "block 0", "block 1", "head, last norm"]


def test_ready_marks_the_last_gradient_of_a_bucket():
    ax = draw(parallel.ready([("0", [1.0, 3.0]), ("1", [2.0, 7.5])], 8.0, "m")).axes[0]
    assert [line.get_xdata()[0] for line in ax.lines if line.get_marker() == "D"] == [3.0, 7.5]
    assert [bar.get_width() for bar in ax.patches] == [5.0, 0.5]


def test_ledger_stacks_kinds_and_says_where_nothing_was_measured():
    kinds = {"weights": [2, 0], "gradients": [4, 0], "masters": [1, 0], "moments": [2, 0]}
    figure = draw(parallel.ledger([4, 8], {"a": kinds, "b": kinds}, {"a": [9, math.nan], "b": [9, 7.5]}, "m"))
    left = figure.axes[0]
    assert texts(left) == ["9.00", "none"]
    assert set(legend(figure)) == {"closed form", "weights", "gradients", "masters", "moments"}
    assert left.get_ylabel() == "bytes a parameter on a rank"


def test_layouts_draw_imbalance_and_replication():
    figure = draw(parallel.layouts([2, 7], {"a": [1, 1], "b": [1, 6.5]}, {"a": [0, 0], "b": [0, 96]}, "m"))
    left, right = figure.axes
    assert [bar.get_height() for bar in left.containers[1]] == [1, 6.5]
    assert [bar.get_height() for bar in right.containers[1]] == [0, 96]
    assert right.get_ylabel() == "% of all state bytes"
    assert legend(figure) == ["a", "b"]


def test_divergence_has_a_line_a_rule():
    figure = draw(
        parallel.divergence({"one": {"right": [0, 0], "wrong": [0, 0.5]}, "two": {"right": [0, 0]}}, "m")
    )
    assert [list(line.get_ydata()) for line in figure.axes[0].lines] == [[0, 0], [0, 0.5]]


def test_traffic_draws_formulas_as_lines_and_counts_as_markers():
    lines = {WAYS[0]: [6e6, 6e6], WAYS[2]: [8e6, 16e6]}
    ax = draw(parallel.traffic([1, 2], lines, "m", lines)).axes[0]
    assert ax.get_ylabel() == "sent by one rank in a step, MB"
    assert [list(line.get_ydata()) for line in ax.lines][:4] == [[6, 6], [6, 6], [8, 16], [8, 16]]
    assert [line.get_linestyle() for line in ax.lines[:2]] == ["-", "None"]
    plain = draw(parallel.traffic([1, 2], {WAYS[2]: [8e12, 16e12]}, "m")).axes[0]
    assert plain.get_ylabel().endswith("TB")
    assert len(plain.lines) == 1


def test_a_way_looks_the_same_whatever_else_is_drawn():
    looks = {name: parallel._look(name) for name in WAYS}
    assert len(set(looks.values())) == 4
    assert parallel._look("DDP") == looks[WAYS[0]]


def test_accumulation_draws_published_end_points_dashed():
    rates = {name: [1000.0, 2000.0] for name in WAYS}
    published = {"DDP": (25.2, 41.4), "FSDP": (26.4, 29.8)}
    figure = draw(parallel.accumulation([1, 4], rates, published, (2**17, 2**22), "report, fig. 8a", "m"))
    left, right = figure.axes
    assert [list(line.get_ydata()) for line in left.lines] == [[1, 2]] * 4
    assert [tuple(line.get_ydata()) for line in right.lines] == list(published.values())
    assert all(line.get_linestyle() == "--" for line in right.lines)
    assert list(right.lines[0].get_xdata()) == [128, 4096]
    assert title(right) == "report, fig. 8a"


def test_exposed_names_both_published_rates():
    ax = draw(parallel.exposed([100, 1000], [5000, 30000], 620.0, {"a": 52_000, "b": 19_400}, "m")).axes[0]
    dashed = [line.get_ydata()[0] for line in ax.lines if line.get_linestyle() == "--"]
    assert dashed == [52.0, 19.4]
    assert {"a", "b"} <= set(texts(ax))


def test_mesh_writes_every_rank_in_its_place():
    ax = draw(parallel.mesh([[[0, 1], [2, 3]], [[4, 5], [6, 7]]], "m")).axes[0]
    assert [t for t in texts(ax) if t.isdigit()] == [str(r) for r in range(8)]
    assert [t for t in texts(ax) if t.startswith("stage")] == ["stage 0", "stage 1"]
    assert [label.get_text() for label in ax.get_yticklabels()] == ["edp 0", "edp 1"]
