"""Figures of shared experts and merge rules, with the report's values as dashed lines. Lesson: 01_moe_layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from moe_lab.viz import style

RULE_NAMES = {
    "olmo": "olmo\nr = K p, s = 1",
    "unit_sum": "unit_sum\nr = p, s = 1",
    "equal_mass": "equal_mass\nr = p/2, s = 1/2",
    "width_proportional": "width_proportional\nr, s by width",
}


def _spread(ax: Axes, x: Sequence[float], low: Sequence[float], high: Sequence[float], color: str) -> None:
    ax.vlines(list(x), list(low), list(high), color=color, linewidth=2, alpha=0.6)


def collapse(
    differences: Mapping[str, float], rounding: float, times: Mapping[str, tuple[float, float, float]]
) -> Figure:
    """Two shared experts against one of summed width: how far outputs are apart, and how long a layout takes.

    ``differences``: name -> largest difference, relative. ``rounding``: epsilon of the number format. ``times``:
    layout -> (median, 10th and 90th percentile), milliseconds.
    """
    figure, (left, right) = style.panels(10.5, 3.2, columns=2, gridspec_kw={"width_ratios": [2, 1]})
    names = list(differences)
    values = [differences[name] for name in names]
    exact = [value < 100 * rounding for value in values]
    colors = [style.BLUE if same else style.VERMILION for same in exact]
    left.barh(range(len(names)), values, color=colors)
    style.label_bars(
        left, [f"{value:.2g}, {'rounding' if same else 'differs'}" for value, same in zip(values, exact)]
    )
    left.set(xscale="log", xlim=(rounding / 4, 40), yticks=range(len(names)))
    left.set_yticklabels(names)
    left.invert_yaxis()
    left.grid(axis="y", visible=False)
    left.axvline(rounding, color=style.INK, linestyle=":", linewidth=1.2)
    style.title(
        left,
        "Only gates that depend on the input break the collapse",
        x="largest difference / largest value (dotted: the format's epsilon)",
    )
    for position, (median, low, high) in enumerate(times.values()):
        color = style.PALETTE[position]
        right.plot(position, median, marker=style.MARKERS[position], color=color, markersize=8)
        _spread(right, [position], [low], [high], color)
        right.annotate(
            f"{median:.1f} ms", (position, median), xytext=(9, 0), textcoords="offset points", va="center"
        )
    right.set(
        xticks=range(len(times)),
        xlim=(-0.5, len(times) - 0.25),
        ylim=(0, 1.25 * max(t[2] for t in times.values())),
    )
    right.set_xticklabels(list(times))
    right.grid(axis="x", visible=False)
    style.title(right, "One result, two layouts", y="forward and backward, ms")
    return figure


def merge_output(
    rms: Mapping[str, float],
    predicted: Mapping[str, float],
    cosine: Mapping[str, float],
    reference: float,
    source: str,
) -> Figure:
    """Output RMS over the dense reference's, and cosine similarity with it, by merge rule; ``reference``: published RMS."""
    figure, (left, right) = style.panels(10.5, 3.7, columns=2, gridspec_kw={"width_ratios": [3, 2]})
    rules = list(rms)
    left.bar(range(len(rules)), [rms[r] for r in rules], width=0.6, color=style.SKY, label="measured")
    style.label_bars(left, [f"{rms[r]:.3f}" for r in rules])
    left.hlines(
        y=[predicted[r] for r in rules],
        xmin=[i - 0.36 for i in range(len(rules))],
        xmax=[i + 0.36 for i in range(len(rules))],
        color=style.VERMILION,
        linewidth=2,
        label="predicted by eq. 85",
    )
    style.reference_line(left, reference, f"{reference} ({source})")
    left.set(xticks=range(len(rules)), ylim=(0, 1.3))
    left.set_xticklabels([RULE_NAMES.get(r, r) for r in rules], fontsize=8.5)
    left.legend(loc="center right")
    style.title(left, "Only r = K p, s = 1 starts at the dense MLP's scale", y="output RMS / dense RMS")
    right.bar(range(len(rules)), [cosine[r] for r in rules], width=0.6, color=style.SKY)
    style.label_bars(right, [f"{cosine[r]:.3f}" for r in rules])
    right.set(xticks=range(len(rules)), ylim=(0, 1.15))
    right.set_xticklabels([r.replace("_", "_\n") for r in rules], fontsize=8.5)
    style.title(right, "... and closest to its direction", y="cosine with dense output")
    for ax in (left, right):
        ax.grid(axis="x", visible=False)
    return figure


def merge_gradients(
    routed: Mapping[str, float], shared: Mapping[str, float], inputs: Mapping[str, tuple[float, float]],
    references: Mapping[str, float], source: str,
) -> Figure:  # fmt: skip
    """Down-projection gradients by rule relative to "olmo" (left) and the input gradient relative to dense (right).

    ``inputs``: name -> (ratio, its standard deviation over seeds). ``references``: published values; "routed" is drawn on
    the left, the names of ``inputs`` on the right.
    """
    figure, (left, right) = style.panels(10.5, 3.7, columns=2, gridspec_kw={"width_ratios": [3, 2]})
    rules = list(routed)
    for values, shift, name, color in (
        (routed, -0.19, "routed experts", style.BLUE),
        (shared, 0.19, "shared expert", style.ORANGE),
    ):
        left.bar(
            [i + shift for i in range(len(rules))],
            [values[r] for r in rules],
            width=0.36,
            color=color,
            label=name,
        )
        style.label_bars(left, [f"{values[r]:.3f}" for r in rules])
    style.reference_line(
        left, references["routed"], f"{references['routed']}: unit_sum, routed ({source})", legend=True
    )
    left.set(xticks=range(len(rules)), ylim=(0, 1.42))
    left.set_xticklabels([RULE_NAMES.get(r, r) for r in rules], fontsize=8.5)
    left.legend(loc="upper right")
    left.grid(axis="x", visible=False)
    style.title(
        left, "Another rule changes the experts' gradients as well", y="down-projection gradient RMS / olmo's"
    )
    for position, (name, (ratio, deviation)) in enumerate(inputs.items()):
        color = style.PALETTE[position]
        right.plot(position, ratio, marker=style.MARKERS[position], color=color, markersize=8)
        _spread(right, [position], [ratio - deviation], [ratio + deviation], color)
        right.annotate(
            f"{ratio:.3f}", (position, ratio), xytext=(8, 3), textcoords="offset points", va="bottom"
        )
        style.reference_line(
            right, references[name], f"{references[name]} ({source})", at=0.52 if position else 0.99,
            side="below",
        )  # fmt: skip
    ratios = [1.0, *(ratio for ratio, _ in inputs.values()), *(references[name] for name in inputs)]
    margin = 0.35 * (max(ratios) - min(ratios))
    right.set(
        xticks=range(len(inputs)),
        xlim=(-0.5, len(inputs) - 0.3),
        ylim=(min(ratios) - margin, max(ratios) + margin),
    )
    right.set_xticklabels(list(inputs))
    right.axhline(1.0, color=style.GREY, linewidth=0.8)
    right.grid(axis="x", visible=False)
    style.title(right, "Rule olmo: a learning router adds gradient", y="input gradient RMS / dense RMS")
    return figure


def merge_sweep(
    panels: Mapping[str, Mapping[str, tuple[Sequence[float], Sequence[float], Sequence[float]]]],
    log_x: Sequence[str], reference: float, source: str,
) -> Figure:  # fmt: skip
    """Output RMS over dense RMS as one quantity varies, a panel each: axis label -> rule -> (x, measured, predicted).

    Markers are measured, lines predicted; panels named in ``log_x`` have a logarithmic axis.
    """
    figure, axes = style.panels(10.0, 6.2, columns=2, rows=2, sharey=True)
    for ax, (name, rules) in zip(axes, panels.items()):
        for position, (rule, (x, measured, predicted)) in enumerate(rules.items()):
            color = style.PALETTE[position]
            ax.plot(x, predicted, color=color, linewidth=1.4)
            ax.plot(x, measured, linestyle="", marker=style.MARKERS[position], color=color, label=rule)
        if name in log_x:
            ticks = list(next(iter(rules.values()))[0])
            ax.set(xscale="log", xticks=ticks)
            ax.set_xticks([], minor=True)
            ax.set_xticklabels([f"{t:g}" for t in ticks])
        ax.set(yscale="log")
        style.reference_line(ax, reference, f"{reference} ({source})" if ax is axes[0] else "")
        ax.set_xlabel(name)
    ticks_y = [0.05, 0.1, 0.2, 0.5, 1, 2]
    axes[0].set(yticks=ticks_y, yticklabels=[f"{t:g}" for t in ticks_y])
    axes[0].set_yticks([], minor=True)
    for ax in axes[::2]:
        ax.set_ylabel("output RMS / dense RMS")
    figure.legend(
        *axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=9, title="markers: measured; lines: eq. 85",
        title_fontsize=9,
    )  # fmt: skip
    style.message(
        figure, "Eq. 85 predicts the initial scale; only olmo's does not move with K and the widths"
    )
    return figure
