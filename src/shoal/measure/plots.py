"""Pictures with matplotlib, from plain numbers."""

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.core import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PANEL_WIDTH, PANEL_HEIGHT = 5.2, 4.0
"""Inches."""


@dataclass(frozen=True, slots=True)
class Series:
    """One set of points; with ``line`` they are joined, otherwise each is a dot.

    colour: a number; series of one picture with the same number have the same colour.
    """

    label: str
    x: Sequence[float]
    y: Sequence[float]
    line: bool = False
    colour: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One pair of axes. log: both axes are logarithmic; diagonal: draw x = y."""

    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    log: bool = False
    diagonal: bool = False


def require_plots() -> None:
    """Raise ConfigError, saying what to install, where matplotlib is missing."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("pictures need matplotlib, which is not installed: pip install 'shoal[plots]'")


def save_plot(path: Path, rows: Sequence[Sequence[Panel]], title: str = "") -> None:
    """Draw panels in rows and write them to ``path``; its ending chooses the format (png, svg, pdf).

    Raises ConfigError where matplotlib is missing or the file cannot be written.
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
        style = "-" if series.line else "o"
        axes.plot(series.x, series.y, style, color=f"C{series.colour % 10}", label=series.label, markersize=4)
    if panel.log:
        _make_logarithmic(axes)
    if panel.diagonal:
        values = [value for series in panel.series for value in (*series.x, *series.y)]
        ends = (min(values), max(values)) if values else (0.0, 1.0)
        axes.plot(ends, ends, "--", color="grey", linewidth=1, zorder=0)
    axes.set_title(panel.title)
    axes.set_xlabel(panel.x_label)
    axes.set_ylabel(panel.y_label)
    axes.grid(alpha=0.3)
    if any(series.label for series in panel.series):
        axes.legend(fontsize="small")


def _make_logarithmic(axes: "Axes") -> None:
    """Logarithmic axes that are labelled at 1, 2 and 5 of each decade, in plain numbers."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    axes.set_xscale("log")
    axes.set_yscale("log")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axis.set_minor_formatter(NullFormatter())
