"""Plots with matplotlib: panels of series as png, svg or pdf."""

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.core import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis

PANEL_WIDTH, PANEL_HEIGHT = 5.2, 4.0
"""Inches."""

BAND_ALPHA = 0.2

PLAIN_NUMBER = "{x:,.10g}"

MANY_DECADES = 1000.0
"""Ratio of the ends of a logarithmic axis above which only powers of ten are labelled."""


@dataclass(frozen=True, slots=True)
class Series:
    """One set of points in a panel."""

    label: str
    """Name in the legend; "" for none."""
    x: Sequence[float]
    y: Sequence[float]
    line: bool = False
    """Join the points by a line; otherwise each is a dot."""
    colour: int = 0
    """Number of a colour in the palette."""
    band: tuple[Sequence[float], Sequence[float]] | None = None
    """The lowest and the highest value at each x, to be shaded."""
    steps: bool = False
    """The line keeps each y until the next x."""
    shape: str = "o"
    """Of points that are not joined: ``o`` (circle), ``s`` (square), ``D`` (diamond), ``^`` or ``v``
    (triangle), ``X`` (cross)."""


@dataclass(frozen=True, slots=True)
class Limit:
    """A vertical line, such as a goal in a distribution of latencies."""

    label: str
    x: float
    colour: int
    """Number of a colour in the palette, as of a series."""


@dataclass(frozen=True, slots=True)
class Marks:
    """Points in time at which something happened, above the axes."""

    label: str
    x: Sequence[float]
    shape: str
    """As ``Series.shape``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One pair of axes and its series."""

    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    log: bool = False
    """Both axes are logarithmic."""
    diagonal: bool = False
    """Also draw the line x = y."""
    log_x: bool = False
    """Only the x axis is logarithmic."""
    share: bool = False
    """y is a fraction, shown as a percentage from 0 to 100%."""
    from_zero: bool = False
    """The y axis begins at 0."""
    stacked: bool = False
    """In reports, the series are areas on top of each other; all have the same x."""
    limits: Sequence[Limit] = ()
    """Only in reports."""
    marks: Sequence[Marks] = ()
    """Only in reports."""


def require_plots() -> None:
    """Raise ConfigError without matplotlib."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("pictures need matplotlib, which is not installed: pip install 'shoal[plots]'")


def save_plot(path: Path, rows: Sequence[Sequence[Panel]], title: str = "") -> None:
    """Draw panels in rows and write them to ``path``; its suffix chooses the format (png, svg, pdf).

    Raises ConfigError without matplotlib, or if the file cannot be written.
    """
    require_plots()
    from matplotlib.figure import Figure

    columns = max(len(row) for row in rows)
    figure = Figure(figsize=(PANEL_WIDTH * columns, PANEL_HEIGHT * len(rows)), layout="constrained")
    grid = figure.subplots(len(rows), columns, squeeze=False)
    for axes_row, row in zip(grid, rows, strict=True):
        for number, axes in enumerate(axes_row):
            if number < len(row):
                _draw(axes, row[number])
            else:
                axes.set_axis_off()
    if title:
        figure.suptitle(title)
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot write the picture {path}: {error}") from error


def _draw(axes: "Axes", panel: Panel) -> None:
    for series in panel.series:
        plot_series(axes, series, f"C{series.colour % 10}", dot=4.0)
    if panel.diagonal:
        values = [value for series in panel.series for value in (*series.x, *series.y)]
        ends = (min(values), max(values)) if values else (0.0, 1.0)
        axes.plot(ends, ends, "--", color="grey", linewidth=1, zorder=0)
    axes.set_title(panel.title)
    format_axes(axes, panel)
    axes.grid(alpha=0.3)
    if any(series.label for series in panel.series):
        axes.legend(fontsize="small")


def plot_series(axes: "Axes", series: Series, colour: str, dot: float) -> None:
    """Draw one series; dot: size of points that are not joined."""
    drawstyle = "steps-post" if series.steps else "default"
    style = "-" if series.line else series.shape
    axes.plot(
        series.x, series.y, style, color=colour, label=series.label, markersize=dot, drawstyle=drawstyle
    )
    if series.band:
        axes.fill_between(series.x, *series.band, color=colour, alpha=BAND_ALPHA, linewidth=0)


def format_axes(axes: "Axes", panel: Panel) -> None:
    """Set scales, limits and labels of the axes, after everything is drawn."""
    from matplotlib.ticker import PercentFormatter, StrMethodFormatter

    if panel.log or panel.log_x:
        axes.set_xscale("log")
        _label_decades(axes.xaxis, axes.get_xlim())
    if panel.log:
        axes.set_yscale("log")
        _label_decades(axes.yaxis, axes.get_ylim())
    if panel.share:
        axes.set_ylim(0, 1.02)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    elif panel.from_zero:
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_formatter(StrMethodFormatter(PLAIN_NUMBER))
    axes.set_xlabel(panel.x_label)
    axes.set_ylabel(panel.y_label)


def _label_decades(axis: "Axis", limits: tuple[float, float]) -> None:
    """Label 1, 2 and 5 of each decade with plain numbers; with many decades, only 1."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    subs = (1.0, 2.0, 5.0) if limits[1] < MANY_DECADES * limits[0] else (1.0,)
    axis.set_major_locator(LogLocator(subs=subs))
    axis.set_major_formatter(StrMethodFormatter(PLAIN_NUMBER))
    axis.set_minor_formatter(NullFormatter())
