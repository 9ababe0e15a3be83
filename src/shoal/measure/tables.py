"""Tables of a run's figures, for the terminal and the HTML report; formats of times, numbers and shares."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from rich import box
from rich.table import Table
from rich.text import Text

from shoal.measure.records import EngineTotals, RunRecord, WeightsTotals
from shoal.measure.summary import GroupSummary, Spread, Summary, summarise

NOTHING = "-"
"""Cell without a figure."""

MEASURES: tuple[tuple[str, str], ...] = (
    ("TTFT", "ttft_s"),
    ("TPOT", "tpot_s"),
    ("E2E", "e2e_s"),
    ("ITL", "inter_token_s"),
    ("MTPOT", "largest_gap_s"),
    ("x alone", "normalised_latency"),
)
"""Label and field of ``GroupSummary`` of each quantity with a spread; all but the last are times."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """A table of text."""

    title: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: int = 1
    """Number of columns with words, from the left; the others have figures."""
    long: Sequence[int] = ()
    """Columns with words whose lines a page breaks."""
    chosen: Sequence[int] = ()
    """Rows that a page emphasises."""
    note: str = ""
    """Small print, on a page."""

    @classmethod
    def of(cls, table: Table) -> "Grid":
        """The text of a table for a terminal; its bold rows are chosen, and its caption is the note."""
        cells = [[str(cell) for cell in column.cells] for column in table.columns]
        words = next((at for at, column in enumerate(table.columns) if column.justify == "right"), len(cells))
        return cls(
            title=str(table.title or ""),
            heads=[str(column.header) for column in table.columns],
            rows=list(zip(*cells, strict=True)),
            words=words,
            long=range(words),
            chosen=[at for at, row in enumerate(table.rows) if row.style == "bold"],
            note=str(table.caption or ""),
        )

    def to_rich(self) -> Table:
        """As a table for a terminal; groups of rows with one name in the first column are separated."""
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True, title=self.title)
        for number, head in enumerate(self.heads):
            justify: Literal["left", "right"] = "left" if number < self.words else "right"
            table.add_column(head, justify=justify, overflow="fold")
        for number, row in enumerate(self.rows):
            following = self.rows[number + 1 : number + 2]
            gap = self.words > 1 and any(cells[0] for cells in following)
            # Text, because rich would take a service named "[red]" for a style.
            table.add_row(*(Text(cell) for cell in row), end_section=gap)
        return table


def summary_tables(summary: Summary) -> list[Table]:
    """The summary for a terminal: requests, latencies, tokens; several engines, weights that come and go, and
    migrations, if any."""
    return [grid.to_rich() for grid in summary_grids(summary)]


def summary_grids(summary: Summary) -> list[Grid]:
    grids = [requests_grid(summary), latency_grid(summary), tokens_grid(summary)]
    if len(summary.engines) > 1:
        grids.append(engines_grid(summary))
    if any(engine.weights for engine in summary.engines):
        grids.append(weights_grid(summary))
    return [*grids, migrations_grid(summary)] if summary.moves or summary.withdrawn else grids


def requests_grid(summary: Summary) -> Grid:
    """One row for each service: how its requests ended, throughput, goodput and SLO attainment.

    Empty columns of refused, failed, cancelled and cut requests are left out, and that of tokens on time.
    """
    overall = summary.overall
    deadlines = overall.tokens_on_time is not None
    endings = [name for name in ("refused", "failed", "cancelled", "cut") if getattr(overall, name)]
    rows = [
        [
            name,
            f"{group.answered:,}/{group.requests:,}",
            *(f"{getattr(group, ending):,}" for ending in endings),
            figure(group.throughput),
            figure(group.goodput),
            share(group.slo_attainment),
            *([share(group.tokens_on_time)] if deadlines else []),
        ]
        for name, group in _groups(summary)
    ]
    heads = ["service", "answered", *endings, "req/s", "goodput", "SLO met"]
    heads += ["on time"] if deadlines else []
    title = f"{overall.requests:,} requests in {seconds(summary.duration_s)}"
    return Grid(title=title, heads=heads, rows=rows)


def tokens_grid(summary: Summary) -> Grid:
    """One row for each service: prompt, cached, output and recomputed tokens, and preemptions.

    A run without engines, as a client measures it, has only what a client knows.
    """
    columns = {
        "prompt": "prompt_tokens",
        "cached": "cached_tokens",
        "output": "output_tokens",
        "output/s": "output_tokens_per_s",
        "preemptions": "preemptions",
        "recomputed": "recomputed_tokens",
    }
    if not summary.engines:
        columns = {head: columns[head] for head in ("prompt", "output", "output/s")}
    rows = [
        [name, *(_count_or_rate(getattr(group, field)) for field in columns.values())]
        for name, group in _groups(summary)
    ]
    title = "Tokens"
    if summary.kv_used_peak is not None:
        title += f"; KV pool {share(summary.kv_used_mean)} in use, at most {share(summary.kv_used_peak)}"
    return Grid(title=title, heads=["service", *columns], rows=rows)


def _count_or_rate(value: float | None) -> str:
    return f"{value:,}" if isinstance(value, int) else figure(value)


def latency_grid(summary: Summary) -> Grid:
    """One row for each service and latency: mean and percentiles."""
    rows = []
    for name, group in _groups(summary):
        present: Sequence[tuple[str, str]] = (
            MEASURES if group.normalised_latency is not None else MEASURES[:-1]
        )
        if group.inter_token_s is None:  # not recorded, or no response has two tokens
            present = [measure for measure in present if measure[1] != "inter_token_s"]
        for number, (word, field) in enumerate(present):
            cells = spread_cells(getattr(group, field), in_seconds=field != "normalised_latency")
            rows.append([name if number == 0 else "", word, *cells])
    heads = ["service", "time", "mean", "p50", "p90", "p95", "p99"]
    return Grid(title="Latency of answered requests", heads=heads, rows=rows, words=2)


def engines_grid(summary: Summary) -> Grid:
    """One row for each engine, short enough for 80 columns.

    KV: mean share of the pool in use; peak: the largest; again: recomputed tokens; up: share of the time that
    it ran.
    """
    heads = ["engine", "steps", "busy", "output", "prefill", "KV", "peak", "preempts", "again"]
    rows = [_engine_row(number, engine, summary.duration_s) for number, engine in enumerate(summary.engines)]
    if summary.engines_up is None:
        return Grid(title="Engines", heads=heads, rows=rows)
    for row, engine in zip(rows, summary.engines, strict=True):
        row.append(share(engine.up))
    title = f"Engines; {summary.engines_up:.2f} of {len(summary.engines)} ran on average"
    return Grid(title=title, heads=[*heads, "up"], rows=rows)


def weights_grid(summary: Summary) -> Grid:
    """One row for each weights, summed over engines: fetches, evictions, and waits of requests for them."""
    totals: dict[str, WeightsTotals] = {}
    for engine in summary.engines:
        for name, weights in engine.weights.items():
            totals[name] = totals[name] + weights if name in totals else weights
    rows = [_weights_row(", ".join(each.services), [each]) for each in totals.values()]
    if len(rows) > 1:
        rows.append(_weights_row("all", list(totals.values())))
    heads = ["weights of", "size", "fetches", "evicted", "fetched", "waits", "mean", "longest"]
    return Grid(title="Weights that come and go", heads=heads, rows=rows)


def _weights_row(name: str, totals: Sequence[WeightsTotals]) -> list[str]:
    waits = sum(each.waits for each in totals)
    waiting_s = sum(each.waiting_s for each in totals)
    return [
        name,
        _gib(sum(each.num_bytes for each in totals)),
        f"{sum(each.fetches for each in totals):,}",
        f"{sum(each.evictions for each in totals):,}",
        _gib(sum(each.fetches * each.num_bytes for each in totals)),
        f"{waits:,}",
        seconds(waiting_s / waits if waits else None),
        seconds(max(each.longest_wait_s for each in totals)),
    ]


def _gib(num_bytes: int) -> str:
    return f"{figure(num_bytes / 2**30)} GiB"


def migrations_grid(summary: Summary) -> Grid:
    """One row for each method of migration: how many were done, aborted, or ended with the request.

    The last row has the requests that a packer withdrew.
    """
    outcomes = ("done", "aborted", "ended")
    rows = [
        [method, *(f"{counts.get(outcome, 0):,}" for outcome in outcomes)]
        for method, counts in summary.moves.items()
    ]
    if summary.withdrawn:
        rows.append(["withdrawn", f"{summary.withdrawn:,}", *[NOTHING] * (len(outcomes) - 1)])
    return Grid(title="Moves of running requests", heads=["by", *outcomes], rows=rows)


def compare(runs: Mapping[str, RunRecord]) -> Table:
    """One row for each run, by name (such as the policy that differs).

    Times are the mean and, below it, the 99th percentile. Columns without figures are left out.
    """
    cells = {name: _run_cells(summarise(run)) for name, run in runs.items()}
    everything = next(iter(cells.values()), {})
    heads = [
        head for head in everything if any(row[head] not in (NOTHING, "100.0%") for row in cells.values())
    ]
    rows = [[name, *(row[head] for head in heads)] for name, row in cells.items()]
    return Grid(title="Runs (times: mean, below it p99)", heads=["run", *heads], rows=rows).to_rich()


def _run_cells(summary: Summary) -> dict[str, str]:
    group = summary.overall
    return {
        "done": share(group.answered / group.requests if group.requests else None),
        "req/s": figure(group.throughput),
        "tok/s": figure(group.output_tokens_per_s),
        "TTFT s": _mean_and_tail(group.ttft_s),
        "TPOT ms": _mean_and_tail(group.tpot_s, 1e3),
        "ITL ms": _mean_and_tail(group.inter_token_s, 1e3),
        "MTPOT s": _mean_and_tail(group.largest_gap_s),
        "E2E s": _mean_and_tail(group.e2e_s),
        "x alone": _mean_and_tail(group.normalised_latency),
        "SLO": share(group.slo_attainment),
        "on time": share(group.tokens_on_time),
        "goodput": figure(group.goodput),
        "preempted": f"{group.preemptions:,}",
    }


def seconds(value: float | None) -> str:
    """A time in a suitable unit with three digits: ``12.3 ms``, ``4.56 s``; large ones in whole seconds."""
    if value is None:
        return NOTHING
    if value == 0:
        return "0 s"
    # At these limits three digits round up to the next unit.
    for limit, scale, unit in ((999.5e-9, 1e9, "ns"), (999.5e-6, 1e6, "us"), (0.9995, 1e3, "ms")):
        if abs(value) < limit:
            return f"{figure(value * scale)} {unit}"
    return f"{figure(value)} s"


def figure(value: float | None) -> str:
    """A number with three digits, or all digits of a larger one: ``0.0123``, ``1.23``, ``12,345``."""
    if value is None:
        return NOTHING
    return f"{value:,.0f}" if abs(value) >= 99.95 or value == 0 else f"{value:#.3g}"


def share(value: float | None) -> str:
    """A fraction as a percentage; below 1 never 100%."""
    if value is None:
        return NOTHING
    text = f"{value:.1%}"
    return "99.9%" if text == "100.0%" and value < 1 else text


def spread_cells(spread: Spread | None, *, in_seconds: bool) -> list[str]:
    if spread is None:
        return [NOTHING] * 5
    write = seconds if in_seconds else figure
    return [write(value) for value in (spread.mean, spread.p50, spread.p90, spread.p95, spread.p99)]


def _groups(summary: Summary) -> list[tuple[str, GroupSummary]]:
    """Each service, then, if there are several, all of them."""
    services = list(summary.services.items())
    return services if len(services) == 1 else [*services, ("all", summary.overall)]


def _mean_and_tail(spread: Spread | None, scale: float = 1.0) -> str:
    return NOTHING if spread is None else f"{figure(spread.mean * scale)}\n{figure(spread.p99 * scale)}"


def _count_cell(value: int) -> str:
    """All digits; from ten million on, in millions."""
    return f"{value:,}" if value < 10**7 else f"{value / 1e6:,.1f}M"


def _engine_row(number: int, engine: EngineTotals, duration_s: float) -> list[str]:
    has_steps = engine.steps > 0
    return [
        str(number),
        _count_cell(engine.steps),
        share(engine.busy_ns / 1e9 / duration_s if duration_s > 0 else None),
        _count_cell(engine.output_tokens),
        _count_cell(engine.prefill_tokens),
        share(engine.kv_used_mean if has_steps else None),
        share(engine.kv_used_peak if has_steps else None),
        _count_cell(engine.preemptions),
        _count_cell(engine.recomputed_tokens),
    ]
