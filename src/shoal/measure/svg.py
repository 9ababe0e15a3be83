"""A panel as inline SVG for the HTML report, whose style sheet sets colours and font."""

import io
import re
from typing import TYPE_CHECKING, Any

from shoal.measure.plots import Panel, format_axes, plot_series, require_plots

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.typing import RcKeyType

WIDTH, HEIGHT = 6.0, 3.1
"""Inches; on the page the picture scales with its box."""

COLOURS = 10
"""Number of series colours in the style sheet: ``--series-0`` to ``--series-9``."""

# matplotlib writes colours as #rrggbb; these are placeholders for variables of the page's style sheet.
_INK, _RULE = "#fe0200", "#fe0201"
_VARIABLES = {_INK: "var(--muted)", _RULE: "var(--rule)"} | {
    f"#fe01{number:02x}": f"var(--series-{number})" for number in range(COLOURS)
}
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
    "lines.linewidth": 1.4,
    "lines.solid_joinstyle": "round",
}
_NO_METADATA = {"Date": None, "Creator": None, "Format": None, "Type": None}


def inline_svg(panel: Panel, name: str) -> str:
    """The panel without title and legend as an ``<svg>`` element; equal bytes for equal panels.

    name: prefix of all ids, unique on the page. Colours are the page's variables ``--series-0`` ..,
    ``--muted`` (text) and ``--rule`` (axes and grid). Raises ConfigError without matplotlib.
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


def _draw(axes: "Axes", panel: Panel) -> None:
    for series in panel.series:
        plot_series(axes, series, f"#fe01{series.colour % COLOURS:02x}", dot=3.0)
    format_axes(axes, panel)
    axes.margins(x=0.01)
    axes.grid(axis="both")


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
