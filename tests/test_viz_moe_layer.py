"""The figures of lesson 01: they show the values they are given, with labelled axes and the published values dashed."""

from __future__ import annotations

import warnings

import matplotlib.pyplot as plt
import pytest

from moe_lab.viz import merge, moe_layer
from moe_lab.viz.widgets import png

RULES = ("olmo", "unit_sum", "equal_mass", "width_proportional")
SOURCE = "report, section 21"


def draw(figure):
    """Render; a layout that does not fit is a warning, and so an error here."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert png(figure).startswith(b"\x89PNG")
    assert plt.get_fignums() == []
    return figure


def texts(ax):
    return [text.get_text() for text in ax.texts]


def heights(container):
    return [bar.get_height() for bar in container]


def test_permutation_names_token_and_expert_of_every_row():
    ax = draw(moe_layer.permutation([[0, 2], [1, 0]], [0, 3, 2, 1])).axes[0]
    names = texts(ax)
    assert names[1::2] == ["token 0\nexpert 0", "token 1\nexpert 0", "token 1\nexpert 1", "token 0\nexpert 2"]
    assert names[0::2] == names[1::2]  # each line joins a slot with the row that holds it
    ends = [line.get_xdata().tolist() for line in ax.lines]
    assert ends == [[0, 0], [3, 1], [2, 2], [1, 3]]


def test_expert_pool_shows_both_counts_in_millions():
    ax = draw(moe_layer.expert_pool([2, 4, 8], [1_000_000, 2_000_000, 4_000_000], [1_000_000] * 3)).axes[0]
    assert [line.get_ydata().tolist() for line in ax.lines] == [[1, 2, 4], [1, 1, 1]]
    assert ax.get_ylabel() == "parameters, millions"
    assert [tick.get_text() for tick in ax.get_xticklabels()] == ["2", "4", "8"]


def test_router_gradient_marks_the_chosen_and_writes_zeros():
    figure = draw(
        moe_layer.router_gradient({"a": [0.5, 0.0, -0.5], "b": [0.4, 0.3, -0.7]}, [2, 0], "message")
    )
    left, right = figure.axes
    assert heights(left.containers[0]) == [0.5, 0.0, -0.5]
    assert texts(left) == ["0"]
    assert texts(right) == []
    assert left.get_xlabel() == "expert (chosen: 0, 2)"
    colors = [bar.get_facecolor() for bar in right.containers[0]]
    assert colors[0] == colors[2] != colors[1]


def test_expert_load_has_bars_for_f_and_points_for_p():
    figure = draw(
        moe_layer.expert_load({"one": ([0.75, 0.25], [0.6, 0.4]), "two": ([0.5, 0.5], [0.5, 0.5])}, "m")
    )
    left = figure.axes[0]
    assert heights(left.containers[0]) == [0.75, 0.25]
    assert list(left.lines[0].get_ydata()) == [0.6, 0.4]
    assert list(left.lines[1].get_ydata()) == [0.5, 0.5]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [
        "f: share of routed slots", "balanced, 1/E", "P: mean router score",
    ]  # fmt: skip


def test_routing_map_puts_tokens_across_and_experts_down():
    weights = [[1.0, 0.0], [0.25, 0.75], [0.0, 1.0]]
    figure = draw(moe_layer.routing_map("ab_", weights, [0.5, 0.5], [0.4, 0.6], "message"))
    grid, load = figure.axes[:2]
    assert grid.images[0].get_array().tolist() == [[1.0, 0.25, 0.0], [0.0, 0.75, 1.0]]
    assert [tick.get_text() for tick in grid.get_xticklabels()] == ["a", "b", "_"]
    assert [bar.get_width() for bar in load.containers[0]] == [0.5, 0.5]


def test_collapse_tells_rounding_from_difference():
    apart = {"no gates": 2e-7, "two gates": 0.3}
    figure = draw(merge.collapse(apart, 1.2e-7, {"two": (10.0, 9.0, 12.0), "one": (8.0, 8.0, 9.0)}))
    left, right = figure.axes
    assert texts(left) == ["2e-07, rounding", "0.3, differs"]
    assert texts(right) == ["10.0 ms", "8.0 ms"]
    assert right.get_ylabel() == "forward and backward, ms"


def test_merge_output_shows_measured_predicted_and_published():
    rms = dict(zip(RULES, (1.02, 0.41, 0.2, 0.22)))
    figure = draw(merge.merge_output(rms, rms, dict.fromkeys(RULES, 0.9), 1.016, SOURCE))
    left, right = figure.axes
    assert heights(left.containers[0]) == list(rms.values())
    assert "1.016 (report, section 21)" in texts(left)
    assert [segment[0][1] for segment in left.collections[0].get_segments()] == list(rms.values())
    assert texts(right) == ["0.900"] * 4


def test_merge_gradients_draws_the_published_values_of_both_panels():
    ratios = dict(zip(RULES, (1.0, 0.25, 0.125, 0.222)))
    inputs = {"router fixed": (1.018, 0.002), "router learning": (1.059, 0.002)}
    references = {"routed": 0.25, "router fixed": 1.016, "router learning": 1.054}
    figure = draw(merge.merge_gradients(ratios, ratios, inputs, references, SOURCE))
    left, right = figure.axes
    assert "0.25: unit_sum, routed (report, section 21)" in [
        t.get_text() for t in left.get_legend().get_texts()
    ]
    assert [line.get_ydata()[0] for line in left.lines if line.get_linestyle() == "--"] == [0.25]
    dashed = [line.get_ydata()[0] for line in right.lines if line.get_linestyle() == "--"]
    assert dashed == [1.016, 1.054]
    assert {"1.018", "1.059", "1.016 (report, section 21)", "1.054 (report, section 21)"} <= set(texts(right))


@pytest.mark.parametrize("log_x", [(), ("K",)])
def test_merge_sweep_has_a_panel_a_quantity_and_a_series_a_rule(log_x):
    series = {rule: ([1, 2, 4], [1.0, 0.9, 0.8], [1.0, 0.91, 0.79]) for rule in RULES}
    figure = draw(
        merge.merge_sweep(dict.fromkeys(("sum of p^2", "K", "a", "b"), series), log_x, 1.016, SOURCE)
    )
    assert [ax.get_xlabel() for ax in figure.axes] == ["sum of p^2", "K", "a", "b"]
    assert figure.axes[1].get_xscale() == ("log" if log_x else "linear")
    predicted, measured = figure.axes[0].lines[:2]
    assert list(measured.get_ydata()) == [1.0, 0.9, 0.8]
    assert list(predicted.get_ydata()) == [1.0, 0.91, 0.79]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == list(RULES)
