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

from moe_lab.errors import MoeLabError

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

    ``controls``: a widget for each argument of ``compute``; sliders should have ``continuous_update=False``. What moe_lab
    refuses is shown as one sentence in place of the figure, never as a traceback. A job has no front end, so the cell draws
    ``plot(compute(...))`` once more as an ordinary figure.
    """
    image = widgets.Image(format="png", layout=widgets.Layout(max_width="100%", object_fit="contain"))
    line = widgets.HTML()

    def say(message: str) -> None:
        line.value = f'<p role="status" class="explore-text">{html.escape(message)}</p>'

    def update(_change: Any = None) -> None:
        try:
            data = compute(**{name: control.value for name, control in controls.items()})
        except Exception as error:
            reason = str(error) if isinstance(error, MoeLabError) else f"{type(error).__name__}: {error}"
            say(f"Not possible: {reason}.")
            image.layout.visibility = "hidden"
            return
        image.value = png(plot(data))
        image.layout.visibility = "visible"
        say(text(data))

    for control in controls.values():
        control.observe(update, names="value")
    update()
    row = widgets.HBox(list(controls.values()), layout=widgets.Layout(flex_flow="row wrap"))
    return widgets.VBox([row, line, image])
