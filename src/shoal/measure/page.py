"""A report as one self-contained HTML page: title, verdict, figures, pictures, tables; all look alike."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from pathlib import Path

from jinja2 import Environment, StrictUndefined, Template
from markupsafe import Markup

from shoal.measure.plots import Panel, require_plots
from shoal.measure.svg import COLOURS, dashes_of, inline_svg
from shoal.measure.tables import Grid

FOLD_ROWS = 24
"""Longer tables are closed at first."""


@dataclass(frozen=True, slots=True)
class Tile:
    """One of the figures at the top of a page."""

    name: str
    value: str
    """The figure with its unit."""
    note: str
    """Small print."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """What a report has, in this order."""

    title: str
    """Models, devices and load."""
    name: str = ""
    """Name of the run or the file; "": none."""
    kind: str
    """"good", "fair" or "bad": colour and sign of the verdict."""
    verdict: str
    """One sentence."""
    remarks: Sequence[str] = ()
    """Objections to the verdict."""
    facts: Mapping[str, str] = field(default_factory=dict)
    """What was run, by name."""
    tiles: Sequence[Tile] = ()
    pictures: Sequence[Panel] = ()
    further_pictures: Sequence[Panel] = ()
    """Closed at first."""
    note: str = ""
    """About the pictures."""
    grids: Sequence[Grid] = ()
    further_grids: Sequence[Grid] = ()
    """Closed at first."""
    words: Sequence[str] = ()
    """Paragraphs at the end, which explain terms."""


@dataclass(frozen=True, slots=True)
class _Key:
    """An entry of a legend."""

    label: str
    kind: str
    """"line", "area", "limit", or "mark"."""
    colour: int = 0
    dashes: str = ""
    """Of a line."""
    shape: str = "o"
    """Of a mark, as ``Series.shape``."""


@dataclass(frozen=True, slots=True)
class _Picture:
    title: str
    svg: Markup
    """An ``<svg>`` element."""
    legend: Sequence[_Key]
    banded: bool
    """Whether some lines have a shaded band."""


def write_page(page: Page, path: Path) -> None:
    """Write ``page_html``; raises ConfigError without matplotlib."""
    text = page_html(page)
    path.write_text(text, encoding="utf-8", newline="\n")


def page_html(page: Page) -> str:
    """The page as HTML; equal pages give equal bytes. Raises ConfigError without matplotlib."""
    require_plots()
    number = len(page.pictures)
    return _template().render(
        page=page,
        pictures=[_picture(panel, f"picture{at}") for at, panel in enumerate(page.pictures)],
        further=[_picture(panel, f"picture{number + at}") for at, panel in enumerate(page.further_pictures)],
        fold=FOLD_ROWS,
        colours=range(COLOURS),
    )


@cache
def _template() -> Template:
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.from_string(
        files("shoal.measure").joinpath("page.html.j2").read_text(encoding="utf-8")
    )


def _picture(panel: Panel, name: str) -> _Picture:
    # The SVG is trusted: its text is axis labels of this package. Names of services are only in the legend,
    # which the template escapes.
    banded = any(series.band for series in panel.series)
    return _Picture(panel.title, Markup(inline_svg(panel, name)), _legend(panel, banded), banded)


def _legend(panel: Panel, banded: bool) -> list[_Key]:
    """Lines or areas (areas from the top down), limits and marks; nothing for a line alone."""
    keys = []
    for series in panel.series:
        colour = series.colour % COLOURS
        dashes = " ".join(f"{length * 1.5:g}" for length in dashes_of(colour))
        kind = "area" if panel.stacked else "line" if series.line else "mark"
        keys.append(_Key(series.label, kind, colour, dashes, series.shape))
    if panel.stacked:
        keys.reverse()
    others = [_Key(limit.label, "limit", limit.colour % COLOURS) for limit in panel.limits]
    others += [_Key(each.label, "mark", -1, shape=each.shape) for each in panel.marks]
    return [*keys, *others] if len(keys) > 1 or banded else others
