"""Figures of the routed layer: rows sorted by expert, the expert pool, the router's gradient, load. Lesson: 01_moe_layer."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

from moe_lab.viz import style


def permutation(indices_TK: Sequence[Sequence[int]], order: Sequence[int]) -> Figure:
    """Slots in token order above, in expert order below; ``order[r]`` is the slot that row r holds. For few tokens."""
    top_k = len(indices_TK[0])
    experts = [expert for choice in indices_TK for expert in choice]
    figure, ax = style.figure(9.5, 3.0)
    for row, slot in enumerate(order):
        color = style.PALETTE[experts[slot] % len(style.PALETTE)]
        ax.plot([slot, row], [0.85, 0.15], color=color, linewidth=1.6)
        box = {"boxstyle": "round,pad=0.35", "edgecolor": color, "facecolor": to_rgba(color, 0.2)}
        for x, y in ((slot, 1), (row, 0)):
            text = f"token {slot // top_k}\nexpert {experts[slot]}"
            ax.text(x, y, text, ha="center", va="center", fontsize=8, bbox=box)
    ax.set(xlim=(-0.7, len(order) - 0.3), ylim=(-0.3, 1.3), xticks=range(len(order)), yticks=[0, 1])
    ax.set_yticklabels(["row, in expert order", "slot, in token order"])
    ax.grid(False)
    ax.spines[["left", "bottom"]].set_visible(False)
    ax.tick_params(length=0)
    style.title(ax, "Sorted by expert, each expert's rows are one contiguous run", x="position")
    return figure


def expert_pool(experts: Sequence[int], total: Sequence[int], active: Sequence[int]) -> Figure:
    """Parameters of a model over the size of its expert pool: all of them, and those that one token uses."""
    figure, ax = style.figure(7.2, 3.6)
    for values, name, marker, color in (
        (total, "all parameters", "o", style.BLUE),
        (active, "parameters one token uses", "s", style.VERMILION),
    ):
        ax.plot(experts, [v / 1e6 for v in values], marker=marker, color=color, label=name)
    ax.set(xscale="log", yscale="log", xticks=experts, ylim=(min(active) / 1e6 * 0.6, max(total) / 1e6 * 1.6))
    ax.set_xticks([], minor=True)
    ax.set_xticklabels([str(e) for e in experts])
    ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    ax.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    ax.yaxis.set_minor_formatter(NullFormatter())
    ax.legend()
    style.title(
        ax,
        "The expert pool grows, the work for a token does not",
        x="experts E in a layer",
        y="parameters, millions",
    )
    return figure


def router_gradient(rows: dict[str, Sequence[float]], chosen: Sequence[int], message: str) -> Figure:
    """Gradient of the loss with respect to one token's logits, an expert a bar; one panel for each entry of ``rows``."""
    figure, axes = style.panels(10.0, 3.1, columns=len(rows), sharey=True)
    for ax, (name, values) in zip(axes, rows.items()):
        colors = [style.VERMILION if e in chosen else style.GREY for e in range(len(values))]
        ax.bar(range(len(values)), values, color=colors)
        for expert, value in enumerate(values):
            if value == 0:
                ax.annotate("0", (expert, 0), ha="center", va="bottom", fontsize=9, color=style.GREY)
        ax.axhline(0, color=style.INK, linewidth=0.8)
        ax.set_xticks(range(len(values)))
        style.title(ax, name, x=f"expert (chosen: {', '.join(map(str, sorted(chosen)))})", bold=False)
    axes[0].set_ylabel("d loss / d logit")
    style.message(figure, message)
    return figure


def _load(ax: Axes, hard: Sequence[float], soft: Sequence[float]) -> None:
    ax.bar(range(len(hard)), hard, color=style.SKY, label="f: share of routed slots")
    ax.plot(
        range(len(soft)), soft, linestyle="", marker="D", markersize=5, color=style.VERMILION,
        label="P: mean router score",
    )  # fmt: skip
    ax.axhline(1 / len(hard), color=style.INK, linestyle=":", linewidth=1.2, label="balanced, 1/E")
    ax.set_xticks(range(len(hard)))


def expert_load(panels: dict[str, tuple[Sequence[float], Sequence[float]]], message: str) -> Figure:
    """Load by expert, one panel for each entry: name -> (hard shares f, soft shares P)."""
    figure, axes = style.panels(10.0, 3.4, columns=len(panels), sharey=True)
    for ax, (name, (hard, soft)) in zip(axes, panels.items()):
        _load(ax, hard, soft)
        style.title(ax, name, x="expert", bold=False)
    axes[0].set_ylabel("share of all experts' load")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="outside lower center", ncols=3)
    style.message(figure, message)
    return figure


def routing_map(
    labels: Sequence[str],
    weights_TE: Sequence[Sequence[float]],
    hard: Sequence[float],
    soft: Sequence[float],
    message: str,
) -> Figure:
    """Which token goes where: tokens across, experts down, darkness the weight; beside it each expert's load."""
    figure, (grid, load) = style.panels(
        10.5, 3.2, columns=2, sharey=True, gridspec_kw={"width_ratios": [4, 1]}
    )
    n_experts = len(hard)
    image = grid.imshow(
        list(zip(*weights_TE)), aspect="auto", cmap="Blues", vmin=0, vmax=1, interpolation="nearest"
    )
    grid.set_xticks(range(len(labels)), labels, fontsize=8)
    grid.set_yticks(range(n_experts))
    grid.grid(False)
    for line in range(1, n_experts):
        grid.axhline(line - 0.5, color=style.PALE, linewidth=0.6)
    style.title(grid, message, x="token, in order (_ is a space)", y="expert")
    figure.colorbar(image, ax=grid, label="weight p", pad=0.01, fraction=0.025)
    load.barh(range(n_experts), hard, color=style.SKY, label="f: slots")
    load.plot(
        soft,
        range(n_experts),
        linestyle="",
        marker="D",
        markersize=5,
        color=style.VERMILION,
        label="P: scores",
    )
    load.axvline(1 / n_experts, color=style.INK, linestyle=":", linewidth=1.2, label="balanced")
    load.set_ylim(n_experts - 0.5, -0.5)
    load.legend(
        loc="upper center",
        bbox_to_anchor=(0.5, 1.22),
        ncols=3,
        fontsize=7.5,
        columnspacing=0.8,
        handlelength=1.2,
    )
    load.set_xlabel("share of the load")
    return figure
