"""One thin pattern for every control: compute(settings) -> data, plot(data) -> Figure, text(data) -> the same in words.

``explore`` puts sliders in front of the three. Lesson: 00_start_here.
"""

from __future__ import annotations

import html
import io
from collections.abc import Callable
from typing import Any, TypeVar

import ipywidgets as widgets
from matplotlib.figure import Figure

Data = TypeVar("Data")


def png(figure: Figure) -> bytes:
    """``figure`` as a PNG image."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", bbox_inches="tight")
    return buffer.getvalue()


def explore(
    compute: Callable[..., Data],
    plot: Callable[[Data], Figure],
    text: Callable[[Data], str],
    **controls: widgets.ValueWidget,
) -> widgets.VBox:
    """Controls that call ``compute(**values)`` on release and show ``plot`` and ``text`` of the result.

    ``controls``: a widget for each argument of ``compute``; sliders should have ``continuous_update=False``. An error in
    ``compute`` is shown as text and the figure stays. A job has no front end, so the cell draws ``plot(compute(...))``
    once more as an ordinary figure.
    """
    image = widgets.Image(format="png", layout=widgets.Layout(max_width="100%", object_fit="contain"))
    line = widgets.HTML()

    def update(_change: Any = None) -> None:
        try:
            data = compute(**{name: control.value for name, control in controls.items()})
        except Exception as error:
            line.value = html.escape(f"{type(error).__name__}: {error}")
            return
        image.value = png(plot(data))
        line.value = html.escape(text(data))

    for control in controls.values():
        control.observe(update, names="value")
    update()
    return widgets.VBox([widgets.HBox(list(controls.values())), line, image])
