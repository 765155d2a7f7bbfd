"""Figures of data parallelism: the ring, buckets, training state, bytes and time of a step, who talks to whom. Lesson: 04_data_parallel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import NullFormatter

from moe_lab.viz import style

STATE_COLORS = {
    "weights": style.BLUE,
    "gradients": style.ORANGE,
    "masters": style.GREEN,
    "moments": style.PINK,
}
LOOKS = {  # the same look for a way of data parallelism in every figure: the first name that begins a label
    "DDP, optimizer on every rank": (style.ORANGE, "s"),
    "DDP": (style.BLUE, "o"),
    "FSDP": (style.GREEN, "^"),
    "HSDP": (style.PINK, "D"),
}
Series = Mapping[str, Sequence[float]]


def _look(label: str) -> tuple[str, str]:
    """Colour and marker of a way of data parallelism."""
    return next((look for name, look in LOOKS.items() if label.startswith(name)), (style.GREY, "v"))


def ring(counts: Sequence[Sequence[Sequence[int]]]) -> Figure:
    """``counts[state][rank][chunk]``: how many ranks' values each chunk holds, at the start and after each step."""
    ranks = len(counts[0])
    columns = ranks if ranks > 2 else len(counts)
    rows = -(-len(counts) // columns)
    figure, axes = style.panels(10.0, 2.3 * rows + 0.3, columns=columns, rows=rows)
    for ax in axes[len(counts) :]:
        ax.set_visible(False)
    half = ranks - 1
    for number, (ax, state) in enumerate(zip(axes, counts)):
        ax.imshow(state, cmap="Blues", vmin=0, vmax=ranks * 1.25)
        for rank, own in enumerate(state):
            for chunk, count in enumerate(own):
                full = count == ranks
                ax.text(
                    chunk, rank, str(count), ha="center", va="center", fontsize=9,
                    color="white" if count > ranks * 0.7 else style.INK, fontweight="bold" if full else "normal",
                )  # fmt: skip
        ax.grid(False)
        ax.set_xticks(range(ranks))
        ax.set_yticks(range(ranks))
        name = "start" if number == 0 else f"reduce {number}" if number <= half else f"gather {number - half}"
        style.title(ax, name, x="chunk", y="rank" if number % columns == 0 else "", bold=False)
    style.message(figure, "Sums travel around the ring, then finished chunks do (number: ranks summed)")
    return figure


def busiest(ranks: Sequence[int], sent: Series, message: str) -> Figure:
    """Bytes that the busiest rank sends or receives in an all-reduce, over the size of the tensor, by number of ranks."""
    figure, ax = style.figure(7.2, 3.5)
    for (name, values), marker in zip(sent.items(), style.MARKERS):
        ax.plot(ranks, values, marker=marker, label=name)
    ax.set_xscale("log", base=2)
    ax.set_yscale("log", base=2)
    _plain_ticks(ax, ranks)
    style.reference_line(ax, 2.0, "2: the ring's limit", at=0.6)
    ax.set_yticks([2**i for i in range(6)], [str(2**i) for i in range(6)])
    ax.legend()
    style.title(ax, message, x="ranks n", y="bytes / tensor's bytes")
    return figure


def _plain_ticks(ax: Axes, values: Sequence[float]) -> None:
    ax.set_xticks(list(values), [f"{v:g}" for v in values])
    ax.xaxis.set_minor_formatter(NullFormatter())
    ax.set_xticks([], minor=True)


def buckets(
    rows: Sequence[tuple[str, int, Sequence[tuple[int, int, int]]]], layers: int, ranks: int, message: str
) -> Figure:
    """The flat buckets: a bar each, in the order of reduction; a rectangle a parameter, coloured by its layer.

    ``rows``: (name, elements, members), a member being (start, elements, layer); layer -1 is the embedding, ``layers`` the
    head. Dashed lines cut each bucket into the shards of ``ranks`` ranks.
    """
    figure, ax = style.figure(10.0, 0.45 * len(rows) + 1.5)
    colors = mpl.colormaps[style.SEQUENTIAL](np.linspace(0.05, 0.95, layers + 2))
    for y, (_, size, members) in enumerate(rows):
        ax.add_patch(
            Rectangle((0, y - 0.36), size / 1e3, 0.72, fc="white", ec=style.GREY, hatch="////", lw=0.6)
        )
        for start, length, layer in members:
            place = (start / 1e3, y - 0.36)
            ax.add_patch(
                Rectangle(
                    place,
                    length / 1e3,
                    0.72,
                    fc=colors[layer + 1],
                    ec="white",
                    linewidth=0.5 if length > size / 200 else 0,
                )
            )
        for cut in range(1, ranks):
            x = size * cut / ranks / 1e3
            ax.plot([x, x], [y - 0.46, y + 0.46], color=style.VERMILION, linestyle=(0, (3, 2)), linewidth=1.3)
    ax.set(xlim=(0, max(size for _, size, _ in rows) / 1e3 * 1.01), ylim=(len(rows) - 0.4, -0.6))
    ax.set_yticks(range(len(rows)), [name for name, _, _ in rows])
    ax.grid(False)
    names = {-1: "embedding", layers: "head, last norm"}
    handles = [Rectangle((0, 0), 1, 1, fc=colors[i + 1]) for i in range(-1, layers + 1)]
    labels = [names.get(i, f"block {i}") for i in range(-1, layers + 1)]
    figure.legend(handles, labels, loc="outside lower center", ncols=min(8, layers + 2), fontsize=8.5)
    style.title(
        ax, message, x=f"elements, thousands (dashed: shards of {ranks} ranks; hatched: padding)", y="bucket"
    )
    return figure


def ready(rows: Sequence[tuple[str, Sequence[float]]], end: float, message: str) -> Figure:
    """When each parameter of a bucket had its gradient, in ms of the last backward; the bucket can be reduced after its last."""
    figure, ax = style.figure(9.0, 0.42 * len(rows) + 1.5)
    for y, (_, times) in enumerate(rows):
        done = max(times)
        ax.barh(
            y,
            end - done,
            left=done,
            height=0.5,
            color=style.SKY,
            alpha=0.55,
            label="free to overlap" if y == 0 else None,
        )
        ax.plot(
            times,
            [y] * len(times),
            "|",
            color=style.INK,
            markersize=11,
            label="a gradient is complete" if y == 0 else None,
        )
        ax.plot(done, y, "D", color=style.VERMILION, label="the bucket is complete" if y == 0 else None)
    ax.axvline(end, color=style.INK, linewidth=1)
    ax.annotate(
        "end of backward",
        (end, len(rows) - 0.55),
        xytext=(-4, 0),
        textcoords="offset points",
        ha="right",
        fontsize=8.5,
    )
    ax.set(ylim=(len(rows) - 0.3, -0.6), xlim=(0, end * 1.02))
    ax.set_yticks(range(len(rows)), [name for name, _ in rows])
    figure.legend(loc="outside lower center", ncols=3)
    style.title(ax, message, x="time since backward began, ms", y="bucket")
    return figure


def ledger(
    ranks: Sequence[int],
    held: Mapping[str, Mapping[str, Sequence[float]]],
    formulas: Mapping[str, Sequence[float]],
    message: str,
) -> Figure:
    """Bytes a parameter that a rank holds. ``held[way][kind]``, by number of ranks; ``formulas[way]``: the closed form."""
    figure, axes = style.panels(10.0, 3.7, columns=len(held), sharey=True)
    for ax, (way, kinds) in zip(axes, held.items()):
        bottom = np.zeros(len(ranks))
        for kind, values in kinds.items():
            ax.bar(range(len(ranks)), values, bottom=bottom, width=0.55, color=STATE_COLORS[kind], label=kind)
            bottom += np.array(values)
        for place, total in enumerate(bottom):
            ax.annotate(
                f"{total:.2f}" if total else "none",
                (place, total),
                xytext=(0, 9),
                textcoords="offset points",
                ha="center",
                fontsize=9,
            )
        for place, value in enumerate(formulas[way]):
            label = "closed form" if place == 0 else ""
            ax.hlines(
                value,
                place - 0.4,
                place + 0.4,
                color=style.INK,
                linestyle=(0, (4, 2)),
                linewidth=1.6,
                label=label,
            )
        ax.set_xticks(range(len(ranks)), [str(n) for n in ranks])
        style.title(ax, way, x="ranks D", bold=False)
    axes[0].set_ylabel("bytes a parameter on a rank")
    axes[0].set_ylim(0, 21)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5)
    style.message(figure, message)
    return figure


def layouts(degrees: Sequence[int], fullest: Series, replicated: Series, message: str) -> Figure:
    """Ways to share out optimizer state: the fullest rank over an even share, and the share of it that is replicated."""
    figure, axes = style.panels(10.5, 3.7, columns=2)
    width = 0.8 / len(fullest)
    for ax, series in zip(axes, (fullest, replicated)):
        for index, (name, values) in enumerate(series.items()):
            at = np.arange(len(degrees)) + (index - (len(series) - 1) / 2) * width
            ax.bar(at, values, width=width, label=name, color=style.PALETTE[index])
        ax.set_xticks(range(len(degrees)), [str(d) for d in degrees])
        ax.set_xlabel("ranks D that share the state")
    axes[0].set_yscale("log", base=2)
    top = max(max(values) for values in fullest.values())
    ticks = [2**i for i in range(8) if 2**i <= 2 * top]
    axes[0].set_yticks(ticks, [str(t) for t in ticks])
    axes[0].axhline(1, color=style.INK, linewidth=0.8)
    style.title(
        axes[0], "The fullest rank", x="ranks D that share the state", y="bytes / even share", bold=False
    )
    style.title(
        axes[1],
        "Kept whole by every rank",
        x="ranks D that share the state",
        y="% of all state bytes",
        bold=False,
    )
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3)
    style.message(figure, message)
    return figure


def divergence(panels: Mapping[str, Series], message: str) -> Figure:
    """Distances that grow, or not, over the steps: one panel for each quantity, a line a rule."""
    figure, axes = style.panels(10.5, 3.7, columns=len(panels), sharey=True)
    for ax, (name, series) in zip(axes, panels.items()):
        for index, (rule, values) in enumerate(series.items()):
            look: dict[str, object] = {"color": style.PALETTE[index], "marker": style.MARKERS[index]}
            look["markersize"] = 9 - 1.5 * index  # lines that coincide show through
            ax.plot(range(len(values)), values, label=rule, **look)  # type: ignore[arg-type]
        style.title(ax, name, x="step", bold=False)
    axes[0].set_ylabel("largest difference / largest weight")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4)
    style.message(figure, message)
    return figure


def traffic(
    microbatches: Sequence[int], formulas: Series, message: str, measured: Series | None = None
) -> Figure:
    """Bytes a rank sends in a step over the microbatches of the step: lines are formulas, markers what was counted."""
    figure, ax = style.figure(7.6, 4.0)
    scale, unit = _scale(max(max(values) for values in formulas.values()))
    for index, (name, values) in enumerate(formulas.items()):
        color, marker = _look(name)
        wide = 4.0 if index == 0 else 1.6  # DDP's two lines coincide where weights are fp32
        ax.plot(microbatches, [v / scale for v in values], color=color, linewidth=wide, label=name)
        if measured:
            counted = [v / scale for v in measured[name]]
            ax.plot(microbatches, counted, marker, color=color, markersize=11 if index == 0 else 6)
    if measured:
        ax.plot([], [], "o", color=style.GREY, label="counted from the collectives")
    _plain_ticks(ax, microbatches)
    ax.set_ylim(bottom=0)
    ax.legend(loc="upper left")
    style.title(ax, message, x="microbatches in a step", y=f"sent by one rank in a step, {unit}")
    return figure


def _scale(largest: float) -> tuple[float, str]:
    return next(((s, u) for s, u in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB")) if largest >= s), (1e3, "kB"))


def accumulation(
    microbatches: Sequence[int],
    rates: Series,
    published: Mapping[str, tuple[float, float]],
    tokens: tuple[float, float],
    source: str,
    message: str,
) -> Figure:
    """Tokens a second over microbatches a step, measured here; beside it the published pair of end points, dashed.

    ``published``: name -> MFU in % at ``tokens`` (first, last) a step.
    """
    figure, (left, right) = style.panels(10.5, 3.9, columns=2)
    for name, values in rates.items():
        color, marker = _look(name)
        left.plot(microbatches, [v / 1e3 for v in values], marker=marker, color=color, label=name)
    _plain_ticks(left, microbatches)
    left.set_ylim(bottom=0)
    style.title(
        left, "Measured here", x="microbatches in a step", y="thousand tokens/s, all ranks", bold=False
    )
    for name, ends in published.items():
        color, marker = _look(name)
        right.plot(
            [t / 2**10 for t in tokens],
            ends,
            marker=marker,
            color=color,
            linestyle=(0, (5, 3)),
            label=f"{name}: {ends[0]} to {ends[1]} %",
        )
    right.set_xscale("log", base=2)
    _plain_ticks(right, [t / 2**10 for t in tokens])
    right.set_ylim(0, 50)
    right.legend(loc="lower right")
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower left", ncols=2)
    style.title(right, source, x="tokens in a step, Ki (end points only)", y="MFU, %", bold=False)
    style.message(figure, message)
    return figure


def exposed(
    bandwidth: Sequence[float],
    rate: Sequence[float],
    meets: float,
    published: Mapping[str, float],
    message: str,
) -> Figure:
    """Tokens a second a GPU if weight traffic is waited for, over the bandwidth that carries it (GB/s); published rates dashed."""
    figure, ax = style.figure(8.0, 3.8)
    ax.plot(
        bandwidth,
        [r / 1e3 for r in rate],
        color=style.BLUE,
        label="computed: compute, then wait for the weights",
    )
    ax.set_xscale("log")
    for name, value in published.items():
        style.reference_line(ax, value / 1e3, name)
    ax.plot(
        meets,
        list(published.values())[1] / 1e3,
        "D",
        color=style.VERMILION,
        label=f"they meet at {meets:.0f} GB/s",
    )
    ticks = [100, 300, 1000, 3000, 10000]
    _plain_ticks(ax, ticks)
    ax.set_ylim(0, max(published.values()) / 1e3 * 1.2)
    ax.legend(loc="upper left", bbox_to_anchor=(0.0, 0.78))
    style.title(ax, message, x="bandwidth of one GPU, GB/s in one direction", y="thousand tokens/s a GPU")
    return figure


def mesh(grid: Sequence[Sequence[Sequence[int]]], message: str) -> Figure:
    """``grid[pp][edp][ep]`` of rank numbers: a block a stage, a row a replica, a column an expert shard."""
    stages, replicas, shards = len(grid), len(grid[0]), len(grid[0][0])
    figure, ax = style.figure(min(11.0, 1.2 + stages * (shards * 0.9 + 0.9)), 0.75 * replicas + 1.9)
    colors = mpl.colormaps[style.SEQUENTIAL](np.linspace(0.15, 0.95, shards))
    for stage, rows in enumerate(grid):
        left = stage * (shards + 1)
        for replica, row in enumerate(rows):
            for shard, rank in enumerate(row):
                ax.add_patch(Rectangle((left + shard, replica), 0.92, 0.92, fc=colors[shard], ec="none"))
                ink = "white" if shard < shards / 2 else style.INK
                ax.text(
                    left + shard + 0.46,
                    replica + 0.46,
                    str(rank),
                    ha="center",
                    va="center",
                    fontsize=11,
                    color=ink,
                    fontweight="bold",
                )
        ax.text(left + shards / 2 - 0.04, -0.15, f"stage {stage}", ha="center", va="bottom", fontsize=10)
    ax.set(xlim=(-0.2, stages * (shards + 1) - 0.8), ylim=(replicas + 0.05, -0.6), aspect="equal")
    ax.set_xticks(
        [s * (shards + 1) + e + 0.46 for s in range(stages) for e in range(shards)],
        [f"ep {e}" for _ in range(stages) for e in range(shards)],
    )
    ax.set_yticks([r + 0.46 for r in range(replicas)], [f"edp {r}" for r in range(replicas)])
    ax.grid(False)
    ax.spines[["left", "bottom"]].set_visible(False)
    ax.tick_params(length=0)
    style.title(ax, message)
    return figure
