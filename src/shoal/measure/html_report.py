"""HTML report of a run: one self-contained page with tables, plots and the slowest requests."""

import heapq
from collections import Counter
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from shoal.measure.curves import MAX_LINES, panels
from shoal.measure.plots import Panel, require_plots
from shoal.measure.records import RequestRow, RunRecord
from shoal.measure.summary import Summary, met_goals, summarise
from shoal.measure.svg import COLOURS, inline_svg
from shoal.measure.tables import NOTHING, Grid, figure, seconds, share, summary_grids

SLOWEST = 20
FAILURES = 20
FOLD_ROWS = 60
"""Longer tables scroll inside a box of limited height."""


@dataclass(frozen=True, slots=True)
class _Figure:
    title: str
    svg: Markup
    """An ``<svg>`` element."""
    legend: list[tuple[str, int]]
    """Name and colour number of each line."""
    banded: bool
    """Whether some lines have a shaded band."""


@dataclass(frozen=True, slots=True)
class _Tile:
    """One of the figures at the top of the page."""

    name: str
    value: str
    """The figure with its unit."""
    note: str
    """Small print."""


def write_report(run: RunRecord, path: Path) -> None:
    """Write ``report_html``; raises ConfigError without matplotlib."""
    page = report_html(run)
    path.write_text(page, encoding="utf-8", newline="\n")


def report_html(run: RunRecord) -> str:
    """The report of a run: facts, tables, plots and slowest requests. Equal runs give equal bytes.

    Raises ConfigError without matplotlib.
    """
    require_plots()
    summary = summarise(run)
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    source = files("shoal.measure").joinpath("report.html.j2").read_text(encoding="utf-8")
    return environment.from_string(source).render(
        title=run.title,
        facts=run.facts,
        tiles=_tiles(summary),
        grids=summary_grids(summary),
        figures=[_figure(panel, f"figure{number}") for number, panel in enumerate(panels(run))],
        many_services=len(summary.services) > MAX_LINES,
        most_lines=MAX_LINES,
        fold=FOLD_ROWS,
        requests=[grid for grid in (slowest_grid(run), failures_grid(run)) if grid.rows],
    )


def slowest_grid(run: RunRecord) -> Grid:
    """The answered requests with the largest end-to-end latency."""
    answered = (row for row in run.requests if row.answered)
    slowest = heapq.nlargest(SLOWEST, answered, key=lambda row: row.finish_ns - row.arrival_ns)
    heads = ["request", "service", "engine", "arrival", "E2E", "TTFT", "TPOT", "MTPOT", "prompt", "output",
             "cached", "preemptions", "recomputed", "goals"]  # fmt: skip
    return Grid(title="Slowest requests", heads=heads, rows=[_slow_row(row) for row in slowest], words=2)


def failures_grid(run: RunRecord) -> Grid:
    """Reasons why requests were not answered, most frequent first."""
    reasons = Counter((row.finish, row.service, row.error or "") for row in run.requests if not row.answered)
    ordered = sorted(reasons.items(), key=lambda item: (-item[1], item[0]))[:FAILURES]
    rows = [[*reason, f"{count:,}"] for reason, count in ordered]
    return Grid(title="Not answered", heads=["end", "service", "why", "requests"], rows=rows, words=3)


def _slow_row(row: RequestRow) -> list[str]:
    multi_token = row.output_tokens > 1
    goals = met_goals(row)
    return [
        row.request_id,
        row.service,
        str(row.engine),
        f"{row.arrival_ns / 1e9:,.3f} s",
        seconds(row.e2e_s),
        seconds(row.ttft_s),
        seconds(row.tpot_s if multi_token else None),
        seconds(row.largest_gap_ns / 1e9 if multi_token else None),
        f"{row.prompt_tokens:,}",
        f"{row.output_tokens:,}",
        f"{row.cached_tokens:,}",
        f"{row.preemptions:,}",
        f"{row.recomputed_tokens:,}",
        NOTHING if goals is None else ("met" if goals else "missed"),
    ]


def _figure(panel: Panel, name: str) -> _Figure:
    legend = [(series.label, series.colour % COLOURS) for series in panel.series]
    # The SVG is trusted: its text is axis labels of this package. Names of services are only in the legend,
    # which the template escapes.
    banded = any(series.band for series in panel.series)
    named = legend if banded or len(legend) > 1 else []
    return _Figure(panel.title, Markup(inline_svg(panel, name)), named, banded)


def _tiles(summary: Summary) -> list[_Tile]:
    group = summary.overall
    tiles = [
        _Tile("Answered", f"{group.answered:,}", f"of {group.requests:,} requests"),
        _Tile("Throughput", figure(group.throughput), "requests per second"),
        _Tile("Output", figure(group.output_tokens_per_s), "tokens per second"),
    ]
    for name, spread in (("TTFT", group.ttft_s), ("TPOT", group.tpot_s), ("E2E", group.e2e_s)):
        if spread is not None:
            tiles.append(_Tile(name, seconds(spread.mean), f"mean; p99 {seconds(spread.p99)}"))
    if group.normalised_latency is not None:
        alone = group.normalised_latency
        tiles.append(_Tile("Normalised latency", figure(alone.mean), f"mean; p99 {figure(alone.p99)}"))
    if group.slo_attainment is not None:
        note = f"goodput {figure(group.goodput)} requests/s"
        tiles.append(_Tile("SLO attainment", share(group.slo_attainment), note))
    if summary.kv_used_peak is not None:
        note = f"mean; peak {share(summary.kv_used_peak)}"
        tiles.append(_Tile("KV pool in use", share(summary.kv_used_mean), note))
    if summary.engines:
        note = f"{group.recomputed_tokens:,} tokens recomputed"
        tiles.append(_Tile("Preemptions", f"{group.preemptions:,}", note))
    return tiles
