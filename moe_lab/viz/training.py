"""Figures of a training run, from its record and metrics. Lesson: 00_start_here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

from moe_lab.viz import style

_WAY = [  # the way of the data: what, where in the package, lesson
    ("tokens", "data", "00"),
    ("embedding", "model", "01"),
    ("attention", "model", "01"),
    ("router", "model", "01 02"),
    ("dispatch", "parallel", "03 05"),
    ("experts", "ops", "03 07"),
    ("combine", "parallel", "05"),
    ("loss", "model", "01"),
]
_BACK = [
    ("optimizer step", "train", "04"),
    ("clip", "train", "04"),
    ("reduce gradients", "parallel", "04 06"),
    ("backward", "ops", "03"),
]


def stack_picture() -> Figure:
    """The whole stack: what happens to a batch, the folder that does it and the lesson that builds it."""
    fig, ax = style.figure(10.5, 3.6)
    ax.set_axis_off()
    ax.set_xlim(0, 8)
    ax.set_ylim(-0.2, 3.35)

    def box(x: float, y: float, text: str, folder: str, lesson: str, color: str) -> None:
        ax.add_patch(
            FancyBboxPatch(
                (x + 0.08, y),
                0.84,
                0.86,
                boxstyle="round,pad=0,rounding_size=0.08",
                fc=color,
                ec="none",
                alpha=0.18,
            )
        )
        ax.text(x + 0.5, y + 0.62, text, ha="center", va="center", fontsize=9, weight="bold")
        ax.text(x + 0.5, y + 0.36, folder, ha="center", va="center", fontsize=8.5, family="monospace")
        ax.text(
            x + 0.5, y + 0.14, f"lesson {lesson}", ha="center", va="center", fontsize=7.5, color=style.GREY
        )

    def arrow(a: tuple[float, float], b: tuple[float, float]) -> None:
        ax.add_patch(FancyArrowPatch(a, b, arrowstyle="-|>", mutation_scale=9, color=style.GREY, lw=1))

    for i, (text, folder, lesson) in enumerate(_WAY):
        block = 2 <= i <= 6
        box(i, 1.75, text, folder, lesson, style.BLUE if block else style.GREY)
        if i:
            arrow((i - 0.08, 2.18), (i + 0.08, 2.18))
    ax.add_patch(
        FancyBboxPatch(
            (2.02, 1.6), 4.96, 1.2, boxstyle="round,pad=0,rounding_size=0.1", fc="none", ec=style.BLUE, lw=1.2
        )
    )
    ax.text(
        4.5,
        2.93,
        "one block, repeated for every layer (a shared expert runs beside dispatch and combine)",
        ha="center",
        fontsize=9,
        color=style.BLUE,
    )
    for i, (text, folder, lesson) in enumerate(_BACK):
        x = 0.6 + i * 1.9
        box(x, 0.15, text, folder, lesson, style.VERMILION)
        if i:
            arrow((x + 0.02, 0.58), (x - 0.94, 0.58))
    arrow((7.5, 1.7), (7.3, 0.62))
    arrow((0.95, 1.06), (0.6, 1.7))
    ax.set_title("One training step: forward along the top, back along the bottom")
    return fig


def loss_curve(rows: Sequence[dict[str, Any]], baselines: dict[str, float]) -> Figure:
    """Training and validation cross-entropy by step; ``baselines``: name -> nats a token, drawn dashed."""
    fig, ax = style.figure(8.0, 4.0)
    steps = [r["step"] for r in rows]
    train = np.array([r["train/CE loss"] for r in rows])
    ax.plot(steps, train, color=style.SKY, lw=0.8, alpha=0.8, label="training, each step")
    points = [(r["step"], r["eval/CE loss"]) for r in rows if "eval/CE loss" in r]
    if points:
        ax.plot(*zip(*points), "o-", color=style.BLUE, label="validation")
        ax.annotate(
            f"{points[-1][1]:.3f}",
            points[-1],
            xytext=(0, -15),
            textcoords="offset points",
            ha="right",
            weight="bold",
            color=style.BLUE,
        )
    for name, value in baselines.items():
        style.reference_line(ax, value, f"{name}: {value:.3f}")
    low, high = min([*train, *baselines.values()]), max([2.4, *baselines.values()])
    ax.set_ylim(low - 0.15, high + 0.75)
    ax.legend(loc="upper right", ncols=2)
    end = points[-1][1] if points else train[-1]
    below = (
        min((value, name) for name, value in baselines.items() if end < value)[1:]
        if any(end < v for v in baselines.values())
        else ()
    )
    message = f"{end:.3f} nats a token after {steps[-1]} steps" + "".join(f", below {name}" for name in below)
    style.title(ax, message, x="optimizer step", y="cross-entropy (nats a token)")
    return fig


def load_by_layer(counts: Sequence[Sequence[int]], layers: Sequence[int]) -> Figure:
    """Heat map of routed slots, layers x experts, each relative to its layer's mean; 1 is balanced."""
    load = np.asarray(counts, dtype=float)
    relative = load / load.mean(1, keepdims=True)
    fig, ax = style.figure(1.6 + 0.62 * load.shape[1], 1.5 + 0.5 * load.shape[0])
    ax.grid(False)
    top = max(2.0, float(relative.max()))
    image = ax.imshow(relative, cmap=style.SEQUENTIAL, vmin=0, vmax=top, aspect="auto")
    for (row, column), value in np.ndenumerate(relative):
        ax.text(
            column,
            row,
            f"{value:.2f}",
            ha="center",
            va="center",
            fontsize=9,
            color="white" if value < 0.6 * top else style.INK,
        )
    ax.set_xticks(range(load.shape[1]))
    ax.set_yticks(range(load.shape[0]), [str(layer) for layer in layers])
    fig.colorbar(image, ax=ax, label="load / mean of its layer")
    worst = np.unravel_index(relative.argmax(), relative.shape)
    message = f"Busiest: expert {worst[1]} of layer {layers[int(worst[0])]}, {relative.max():.2f} x its layer's mean"
    style.title(ax, message, x="expert", y="layer")
    return fig


def imbalance_curve(rows: Sequence[dict[str, Any]]) -> Figure:
    """Load imbalance (max / mean) of each layer, and the balance loss, by step."""
    fig, (left, right) = style.panels(10.0, 3.4)
    names = sorted({k for r in rows for k in r if k.endswith("/load imbalance") and k.startswith("block")})
    steps = [r["step"] for r in rows]
    width = max(1, len(steps) // 25)
    middle = steps[width - 1 :]

    def smooth(values: list[float]) -> Any:
        return np.convolve(values, np.ones(width) / width, mode="valid")

    curves = [smooth([r[name] for r in rows]) for name in names]
    for name, curve in zip(names, curves):
        left.plot(middle, curve, label=f"layer {int(name[6:8])}")
    start, end = (max(curve[at] for curve in curves) for at in (0, -1))
    left.legend(ncols=2)
    style.title(
        left,
        f"Worst layer's load: {start:.2f} times the mean, then {end:.2f}",
        x="optimizer step",
        y=f"max / mean load (mean of {width} steps)",
    )
    balance = smooth([r["train/load balancing loss unscaled"] / len(names) for r in rows])
    right.plot(middle, balance, color=style.VERMILION)
    style.reference_line(right, 1.0, "balanced: 1")
    style.title(
        right,
        f"Balance loss a layer: {balance[-1]:.3f} at the end",
        x="optimizer step",
        y="N sum f P, mean of layers",
    )
    return fig


def parameter_bars(names: Sequence[str], total: Sequence[int], active: Sequence[int]) -> Figure:
    """Total against active parameters of several models, on a logarithmic axis."""
    fig, ax = style.figure(8.5, 0.9 + 0.36 * len(names))
    y = np.arange(len(names))
    ax.barh(y, total, height=0.72, color=style.PALE, label="total")
    ax.barh(y, active, height=0.4, color=style.BLUE, label="active for one token")
    for i, (t, a) in enumerate(zip(total, active)):
        ax.annotate(
            f"{100 * a / t:.3g} % active",
            (t, i),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=8.5,
        )
    ax.set_xscale("log")
    ax.set_xlim(right=max(total) * 8)
    ax.set_yticks(y, names)
    ax.invert_yaxis()
    ax.grid(axis="y", visible=False)
    ax.legend(loc="upper right")
    style.title(ax, "One design from a laptop to 2.4 trillion parameters", x="parameters")
    return fig
