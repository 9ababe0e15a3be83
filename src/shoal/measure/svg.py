"""A panel as inline SVG for the HTML report, whose style sheet sets colours, hatches and font."""

import io
import re
from typing import TYPE_CHECKING, Any

import numpy as np

from shoal.measure.plots import BAND_ALPHA, Panel, Series, format_axes, require_plots

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.typing import RcKeyType

WIDTH, HEIGHT = 4.5, 2.9
"""Inches; on the page the picture scales with its box. Small, so that text can be read on a telephone."""

COLOURS = 10
"""Number of series colours in the style sheet: ``--series-0`` to ``--series-9``; and of ``#hatch-0`` .."""

DASHES: tuple[tuple[float, ...], ...] = (
    (),
    (5, 1.8),
    (1.3, 1.3),
    (6, 1.6, 1.3, 1.6),
    (3, 1.2),
    (8, 2, 3, 2),
    (4, 1.3, 1.3, 1.3, 1.3, 1.3),
    (11, 2.5),
    (1.3, 3),
)
"""On and off lengths of lines, in units of their width, by number of the colour; () is a solid line.

The last colour, that of all services, has a thick solid line.
"""

_LINE, _THICK = 1.5, 2.3
_DOT = 5.0
_MARK_HEIGHT = 0.065
"""Distance between two rows of marks, in heights of the axes."""

# matplotlib writes colours as #rrggbb; these are placeholders for what the page's style sheet defines.
_INK, _RULE = "#fe0200", "#fe0201"
_COLOUR, _HATCH = "#fe01{:02x}", "#fe03{:02x}"
_VARIABLES = (
    {_INK: "var(--muted)", _RULE: "var(--rule)"}
    | {_COLOUR.format(number): f"var(--series-{number})" for number in range(COLOURS)}
    | {_HATCH.format(number): f"url(#hatch-{number})" for number in range(COLOURS)}
)
_STYLE: "dict[RcKeyType, Any]" = {
    # A fixed salt, and no date in the metadata, give equal bytes for equal panels.
    "svg.hashsalt": "shoal",
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 8.5,
    "axes.linewidth": 0.8,
    "axes.edgecolor": _RULE,
    "axes.labelcolor": _INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.axisbelow": True,
    "grid.color": _RULE,
    "grid.linewidth": 0.6,
    "xtick.color": _RULE,
    "xtick.labelcolor": _INK,
    "xtick.minor.size": 0.0,
    "ytick.color": _RULE,
    "ytick.labelcolor": _INK,
    "ytick.major.size": 0.0,
    "lines.linewidth": _LINE,
    "lines.solid_joinstyle": "round",
}
_NO_METADATA = {"Date": None, "Creator": None, "Format": None, "Type": None}


def inline_svg(panel: Panel, name: str) -> str:
    """The panel without title and legend as an ``<svg>`` element; equal bytes for equal panels.

    name: prefix of all ids, unique on the page. Colours are the page's variables ``--series-0`` ..,
    ``--muted`` (text) and ``--rule`` (axes and grid); areas have the page's patterns ``#hatch-0`` .. Raises
    ConfigError without matplotlib.
    """
    require_plots()
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(WIDTH, HEIGHT), layout="constrained")
        axes = figure.subplots()
        _draw(axes, panel)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata=_NO_METADATA)
    return _for_page(buffer.getvalue(), name, panel.title)


def dashes_of(colour: int) -> tuple[float, ...]:
    """On and off lengths of the lines of a colour."""
    number = colour % COLOURS
    return DASHES[number] if number < len(DASHES) else ()


def _draw(axes: "Axes", panel: Panel) -> None:
    if panel.stacked:
        _draw_stack(axes, panel)
    else:
        for series in panel.series:
            _draw_series(axes, series)
    for limit in panel.limits:
        colour = _COLOUR.format(limit.colour % COLOURS)
        axes.axvline(limit.x, color=colour, linewidth=1.1, dashes=dashes_of(limit.colour) or (None, None))
        axes.plot(
            [limit.x], [1], marker="v", color=colour, markersize=6, transform=axes.get_xaxis_transform()
        )
    _draw_marks(axes, panel)
    format_axes(axes, panel)
    _whole_numbers(axes, panel)
    axes.margins(x=0.01)
    axes.grid(axis="both")


def _draw_series(axes: "Axes", series: Series) -> None:
    colour = _COLOUR.format(series.colour % COLOURS)
    if not series.line:
        axes.plot(series.x, series.y, series.shape, color=colour, markersize=_DOT)
        return
    dashes = dashes_of(series.colour)
    axes.plot(
        series.x,
        series.y,
        color=colour,
        linewidth=_LINE if series.colour % COLOURS < len(DASHES) else _THICK,
        linestyle=(0, dashes) if dashes else "-",
        drawstyle="steps-post" if series.steps else "default",
        dash_capstyle="butt",
    )
    if series.band:
        axes.fill_between(series.x, *series.band, color=colour, alpha=BAND_ALPHA, linewidth=0)


def _draw_stack(axes: "Axes", panel: Panel) -> None:
    below = np.zeros(max((len(series.x) for series in panel.series), default=0))
    for series in panel.series:
        above = below + np.asarray(series.y, dtype=np.float64)
        number = series.colour % COLOURS
        axes.fill_between(series.x, below, above, color=_HATCH.format(number), linewidth=0)
        axes.plot(series.x, above, color=_COLOUR.format(number), linewidth=1.1)
        below = above


def _draw_marks(axes: "Axes", panel: Panel) -> None:
    for row, marks in enumerate(panel.marks):
        height = [1.04 + _MARK_HEIGHT * row] * len(marks.x)
        axes.plot(
            marks.x,
            height,
            marks.shape,
            color=_INK,
            markersize=4.5,
            markeredgewidth=0,
            clip_on=False,
            transform=axes.get_xaxis_transform(),
        )


def _whole_numbers(axes: "Axes", panel: Panel) -> None:
    """Numbers of requests have no fractions, and an axis of zeros only goes to 1."""
    from matplotlib.ticker import MaxNLocator

    if panel.y_label == "requests":
        axes.yaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    if panel.from_zero and not panel.share and not any(value for each in panel.series for value in each.y):
        axes.set_ylim(0, 1)


def _for_page(text: str, name: str, title: str) -> str:
    """The ``<svg>`` element of a file: without size, with prefixed ids and the page's colours."""
    text = text[text.index("<svg") :]
    head, body = text.split(">", 1)
    head = re.sub(r' (width|height|xmlns|xmlns:xlink|version)="[^"]*"', "", head)
    body = re.sub(r"<metadata>.*?</metadata>", "", body, flags=re.DOTALL)
    body = re.sub(r'\bid="', f'id="{name}-', body)
    body = re.sub(r"url\(#", f"url(#{name}-", body)
    body = re.sub(r'xlink:href="#', f'href="#{name}-', body)
    for colour, variable in _VARIABLES.items():
        body = body.replace(colour, variable)
    label = title.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;")
    return f'{head} role="img" aria-label="{label}">{body.strip()}'
