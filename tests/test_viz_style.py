"""The shared look of figures, and the pattern of every control."""

from __future__ import annotations

import ipywidgets as widgets
import matplotlib.pyplot as plt
import pytest
from matplotlib.figure import Figure

from moe_lab.errors import ConfigError
from moe_lab.viz import style
from moe_lab.viz.widgets import explore, png


def test_figures_belong_to_the_cell_that_returns_them():
    figure, ax = style.figure(5.0, 3.0)
    assert isinstance(figure, Figure)
    assert figure.get_size_inches().tolist() == [5.0, 3.0]
    assert ax.figure is figure
    assert not ax.spines["top"].get_visible()
    made, axes = style.panels(8.0, 4.0, columns=3, rows=2)
    assert len(axes) == 6
    assert made.get_layout_engine() is not None
    assert plt.get_fignums() == []


def test_apply_sets_the_look_for_plain_matplotlib():
    with plt.rc_context():
        style.apply()
        assert plt.rcParams["axes.prop_cycle"].by_key()["color"] == list(style.PALETTE)
        assert plt.rcParams["axes.grid"] is True


def test_neighbours_in_the_palette_differ_in_lightness_or_hue_and_have_their_own_markers():
    assert len(set(style.PALETTE)) == len(style.PALETTE)
    assert len(set(style.MARKERS)) == len(style.MARKERS) == len(style.PALETTE)


@pytest.mark.parametrize("axis", ["x", "y"])
@pytest.mark.parametrize("side", ["above", "below"])
def test_a_reference_line_is_dashed_and_says_its_value(axis, side):
    figure, ax = style.figure()
    ax.plot([0, 1], [0, 1])
    style.reference_line(ax, 0.5, "0.5 (report, section 21)", axis=axis, side=side)
    line = ax.lines[-1]
    assert line.get_linestyle() == "--"
    data = line.get_ydata() if axis == "y" else line.get_xdata()
    assert list(data) == [0.5, 0.5]
    assert [text.get_text() for text in ax.texts] == ["0.5 (report, section 21)"]
    assert png(figure).startswith(b"\x89PNG")


def test_a_reference_line_can_go_to_the_legend():
    _, ax = style.figure()
    style.reference_line(ax, 2.0, "2 (report)", legend=True)
    assert ax.get_legend_handles_labels()[1] == ["2 (report)"]
    assert all(not text.get_text() for text in ax.texts)


def plot(data):
    figure, ax = style.figure(3, 2)
    ax.bar([0], [data["value"]])
    return figure


def compute(factor, offset):
    if factor == 0:
        raise ValueError("a factor of <0>")
    if factor == 5:
        raise ConfigError("a factor of 5 is more than 4")
    return {"value": factor * 10 + offset}


def test_a_moved_control_changes_figure_and_text():
    factor = widgets.IntSlider(1, min=0, max=5, continuous_update=False)
    offset = widgets.IntSlider(2, min=0, max=5, continuous_update=False)
    box = explore(compute, plot, lambda data: f"value {data['value']}", factor=factor, offset=offset)
    controls, line, image = box.children
    assert list(controls.children) == [factor, offset]
    assert ">value 12</p>" in line.value
    before = bytes(image.value)
    factor.value = 4
    assert ">value 42</p>" in line.value
    assert bytes(image.value).startswith(b"\x89PNG")
    assert bytes(image.value) != before
    factor.value = 0  # an error is said in words, in place of the figure; the controls stay
    assert "Not possible: ValueError: a factor of &lt;0&gt;." in line.value
    assert image.layout.visibility == "hidden"
    factor.value = 5
    assert "Not possible: a factor of 5 is more than 4." in line.value
    factor.value = 1
    assert ">value 12</p>" in line.value
    assert plt.get_fignums() == []
