"""One look for every figure: palette, figure sizes, the dashed line of a published value.

The palette is Okabe and Ito's, which readers with any common colour blindness can tell apart; figures also use markers,
line styles or labels, so that no message hangs on colour alone. Lesson: 00_start_here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import matplotlib as mpl
import matplotlib.pyplot as plt
from cycler import cycler
from matplotlib.axes import Axes
from matplotlib.figure import Figure

BLUE, ORANGE, GREEN, PINK, SKY, VERMILION = "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00"
INK, GREY, PALE = "#222222", "#6B6B6B", "#D9D9D9"
PALETTE: tuple[str, ...] = (BLUE, ORANGE, GREEN, PINK, SKY, VERMILION, GREY)
MARKERS: tuple[str, ...] = ("o", "s", "^", "D", "v", "P", "X")
SEQUENTIAL = "cividis"  # for amounts: rises evenly in lightness, the same to colour-blind readers

_RC: Any = {
    "figure.dpi": 110,
    "figure.constrained_layout.use": True,
    "figure.facecolor": "white",
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.labelsize": 10,
    "axes.edgecolor": GREY,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": PALE,
    "grid.linewidth": 0.6,
    "xtick.color": INK,
    "ytick.color": INK,
    "text.color": INK,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "lines.linewidth": 1.8,
    "lines.markersize": 6,
    "axes.prop_cycle": cycler(color=PALETTE),
}


def apply() -> None:
    """Use this look for everything drawn from here on. A notebook calls it once, in its second cell."""
    mpl.rcParams.update(_RC)


def panels(
    width: float = 10.0, height: float = 3.6, columns: int = 2, rows: int = 1, **options: Any
) -> tuple[Figure, list[Axes]]:
    """A figure of ``width`` x ``height`` inches and its axes, row by row; ``options`` go to ``plt.subplots``.

    The figure is taken out of pyplot's hands: a cell shows it by ending with it, and once only.
    """
    with plt.rc_context(_RC):
        figure, axes = plt.subplots(rows, columns, figsize=(width, height), squeeze=False, **options)
    plt.close(figure)
    return figure, list(axes.ravel())


def figure(width: float = 7.0, height: float = 3.8, **options: Any) -> tuple[Figure, Axes]:
    """A figure of ``width`` x ``height`` inches with one pair of axes."""
    made, (ax,) = panels(width, height, columns=1, **options)
    return made, ax


def reference_line(
    ax: Axes,
    value: float,
    label: str,
    *,
    axis: Literal["x", "y"] = "y",
    color: str = INK,
    at: float = 0.99,
    side: Literal["above", "below"] = "above",
    legend: bool = False,
) -> None:
    """A published value as a dashed line, with ``label`` (the value and its source) written along it.

    ``axis``: the axis that ``value`` is on. ``at``: where the label ends, as a share of the other axis; ``side``: which
    side of the line it is on (for ``axis="x"``: above is right of it). ``legend``: the label goes to the legend instead,
    where the line crosses other text.
    """
    line: dict[str, Any] = {"color": color, "linestyle": (0, (5, 3)), "linewidth": 1.2, "zorder": 2.5}
    if legend:
        line["label"] = label
        label = ""
    offset = 3 if side == "above" else -3
    text: dict[str, Any] = {"fontsize": 8.5, "color": color, "textcoords": "offset points"}
    if axis == "y":
        ax.axhline(value, **line)
        ax.annotate(
            label, (at, value), xycoords=("axes fraction", "data"), xytext=(0, offset),
            ha="right", va="bottom" if side == "above" else "top", **text,
        )  # fmt: skip
    else:
        ax.axvline(value, **line)
        ax.annotate(
            label, (value, at), xycoords=("data", "axes fraction"), xytext=(offset, 0), rotation=90,
            ha="left" if side == "above" else "right", va="top", **text,
        )  # fmt: skip


def title(ax: Axes, message: str, *, x: str = "", y: str = "", bold: bool = True) -> None:
    """The figure's one message as title, and the axes' labels with their units. ``bold``: off for a panel's own title."""
    ax.set_title(message, fontweight="bold" if bold else "normal")
    ax.set_xlabel(x)
    ax.set_ylabel(y)


def message(figure: Figure, text: str) -> None:
    """The one message of a figure with several panels."""
    figure.suptitle(text, x=0.01, ha="left", fontsize=11, fontweight="bold")


def label_bars(ax: Axes, texts: Sequence[str]) -> None:
    """Write a text at the end of each bar of the last bar chart drawn on ``ax``."""
    labels = ax.bar_label(ax.containers[-1], labels=list(texts), padding=3, fontsize=9)  # type: ignore[arg-type]
    for label in labels:  # so that a line behind the text does not cross it
        label.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 0.8, "alpha": 0.85})
        label.set_zorder(4)
