"""From one GPU to many: which GPU holds which stage and experts, and the training state that each then holds.

``draw`` turns what :func:`moe_lab.plan.holdings` computed into a figure, ``describe`` into a sentence, ``ui`` puts
sliders in front of both. Lessons: 00_start_here, 09_capacity_planner.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import ipywidgets as widgets
import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from moe_lab.config import ModelConfig
from moe_lab.plan import Holding, holdings
from moe_lab.viz import style
from moe_lab.viz.widgets import explore

GIB = 2**30
_KINDS = (
    ("weights", "bf16 weights", style.BLUE),
    ("gradients", "fp32 gradients", style.ORANGE),
    ("optimizer", "fp32 master and moments", style.GREEN),
)


def describe(held: Sequence[Holding], memory_gib: float) -> str:
    """The layout's numbers in a sentence."""
    worst = max(held, key=lambda h: h.state)
    stages, ep, edp = (max(getattr(h, name) for h in held) + 1 for name in ("stage", "ep", "edp"))
    fits = "fits in" if worst.state <= memory_gib * GIB else "does not fit in"

    def count(number: int, noun: str) -> str:
        return f"{number} {noun}" + ("" if number == 1 else "s")

    return (
        f"{count(len(held), 'GPU')} = {count(stages, 'pipeline stage')} x {count(edp, 'expert replica')} x "
        f"{count(ep, 'expert-parallel rank')}; the fullest GPU ({worst.gpu}) holds {count(len(worst.experts), 'expert')} of each of its "
        f"{count(len(worst.layers), 'layer')} and {worst.state / GIB:.3g} GiB of training state, which {fits} {memory_gib:.0f} GiB "
        "before activations."
    )


def draw(held: Sequence[Holding], memory_gib: float, title: str) -> Figure:
    """A square for each GPU, coloured by its expert-parallel rank, a block for each stage; beside it the fullest GPU's memory.

    Within a block the expert-parallel ranks run along a row, so that GPUs below one another hold the same experts.
    """
    stages, ranks = (max(getattr(h, name) for h in held) + 1 for name in ("stage", "ep"))
    per_stage = len(held) // stages
    width = min(per_stage, ranks * max(1, round(math.sqrt(per_stage * 1.5) / ranks)))
    height = -(-per_stage // width)
    across = max(1, min(stages, round(math.sqrt(stages * 1.8 * (height + 1.2) / (width + 1)))))
    fig, (grid, bars) = style.panels(11.0, 4.4, width_ratios=(3.2, 1))
    grid.set_axis_off()
    grid.set_aspect("equal")
    colors = mpl.colormaps[style.SEQUENTIAL](np.linspace(0.15, 0.95, ranks))
    write = across * (width + 1) <= 18
    for h in held:
        place = h.edp * ranks + h.ep
        left, top = h.stage % across * (width + 1), h.stage // across * (height + 1.2)
        x, y = left + place % width, top + place // width
        grid.add_patch(Rectangle((x + 0.04, y + 0.04), 0.92, 0.92, fc=colors[h.ep], ec="none"))
        if write:
            ink = "white" if h.ep < ranks / 2 else style.INK
            span = (
                f"{h.experts.start}-{h.experts.stop - 1}"
                if len(h.experts) > 1
                else f"{h.experts.start}"
                if h.experts
                else ""
            )
            grid.text(
                x + 0.5, y + 0.34, f"{h.gpu}", ha="center", va="center", fontsize=8, weight="bold", color=ink
            )
            grid.text(
                x + 0.5,
                y + 0.7,
                span,
                ha="center",
                va="center",
                fontsize=min(6.5, 90 / (across * (width + 1))),
                color=ink,
            )
        if place == 0:
            label = f"stage {h.stage}: layers" if stages > 1 else "layers"
            grid.text(
                x + 0.04, y - 0.12, f"{label} {h.layers.start}-{h.layers.stop - 1}", va="bottom", fontsize=8.5
            )
    grid.set_xlim(0, across * (width + 1) - 1)
    grid.set_ylim(-(-stages // across) * (height + 1.2) - 1.2, -1)
    grid.set_title(
        f"{title}\nbold: GPU, small: its experts" if write else f"{title}\ncolour: which experts it holds"
    )
    worst = max(held, key=lambda h: h.state)
    bottom = 0.0
    for field, label, color in _KINDS:
        size = getattr(worst, field) / GIB
        bars.bar([0], [size], bottom=[bottom], color=color, label=f"{label}: {size:,.3g}", width=0.6)
        bottom += size
    style.reference_line(bars, memory_gib, f"{memory_gib:.0f} GiB a card")
    bars.set_xticks([])
    bars.set_xlim(-0.6, 1.2)
    bars.set_ylim(0, max(bottom, memory_gib) * 1.1)
    bars.legend(loc="upper center", bbox_to_anchor=(0.4, -0.02), fontsize=8)
    style.title(bars, f"Fullest GPU: {bottom:,.3g} GiB", y="training state (GiB)")
    return fig


def ui(
    models: dict[str, ModelConfig], gpus: int = 8, ep: int = 8, pp: int = 1, memory_gib: float = 141.0
) -> widgets.VBox:
    """Sliders for the number of GPUs and the degrees, over :func:`draw`; an impossible layout is a sentence, not a traceback.

    ``models``: name -> configuration, the first is shown first.
    """
    powers = [2**i for i in range(11)]

    def slider(options: list[int], value: int, label: str) -> widgets.SelectionSlider:
        return widgets.SelectionSlider(
            options=options, value=value, description=label, continuous_update=False
        )

    return explore(
        lambda model, count, ep, pp: (model, holdings(models[model], count, ep, pp)),
        lambda data: draw(data[1], memory_gib, f"{data[0]} on {len(data[1])} GPUs"),
        lambda data: describe(data[1], memory_gib),
        model=widgets.Dropdown(options=list(models), description="model"),
        count=slider(powers, gpus, "GPUs"),
        ep=slider(powers[:7], ep, "EP"),
        pp=slider(powers[:5], pp, "PP"),
    )
