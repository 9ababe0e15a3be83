"""Curves of a run as panels: latency distributions (CDFs) with goals, rates, state of the engines."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from shoal.core import SLO
from shoal.measure.plots import Limit, Panel, Series
from shoal.measure.records import RequestRow, RunRecord, Sample
from shoal.measure.service_colours import ALL_COLOUR, MAX_NAMED, service_colours
from shoal.measure.stacks import stacks_by_service
from shoal.measure.summary import met_goals, normalised_latency_of
from shoal.measure.tables import seconds
from shoal.measure.time_axis import Floats, TimeAxis, columns, downsample, sum_by_time

CDF_POINTS = 500
MAX_RATE_BINS, MIN_RATE_BINS = 80, 8
REQUESTS_PER_BIN = 5
"""With fewer requests per bin, rates would be noise."""

GOAL_RANGE = 20.0
"""A goal is drawn unless it is more than so many times above or below all latencies."""

LOG_AXIS_RATIO = 20.0
"""Ratio of 99th to 1st percentile above which times get a logarithmic axis."""


def panels(run: RunRecord) -> list[Panel]:
    """All panels that are not empty, the most important ones first."""
    return [*first_panels(run), *further_panels(run)]


def first_panels(run: RunRecord) -> list[Panel]:
    """Distributions of latencies with their goals, and what each service had of the engines over time.

    Without samples of engines there are rates instead.
    """
    rates = [] if run.samples else rate_panels(run)
    return [panel for panel in (*latency_panels(run), *stacks_by_service(run), *rates) if panel.series]


def further_panels(run: RunRecord) -> list[Panel]:
    """Rates, state of the engines, and more latencies."""
    several = len(run.engines) > 1
    told_apart = any(sample.services for sample in run.samples)
    states = state_panels(run) if several or not told_apart else []
    if told_apart:
        states = [replace(panel, title=f"{panel.title}, by engine") for panel in states]
    rates = rate_panels(run) if run.samples else []
    return [panel for panel in (*rates, *states, *more_latency_panels(run)) if panel.series]


def latency_panels(run: RunRecord) -> list[Panel]:
    """Distributions over the answered requests of each service and, with several services, over all.

    Of many services, those with most requests are shown by name. Goals are vertical lines.
    """
    cdfs = _Distributions(run)
    return [
        cdfs.panel("Time to first token (TTFT)", lambda row: row.ttft_s, lambda slo: slo.ttft_s),
        cdfs.panel("Time per output token (TPOT)", _tpot_s, lambda slo: slo.tpot_s),
        cdfs.panel("End-to-end latency (E2E)", lambda row: row.e2e_s, lambda slo: slo.e2e_s),
    ]


def more_latency_panels(run: RunRecord) -> list[Panel]:
    """Distributions of the longest gaps between tokens, and of normalised latency."""
    cdfs = _Distributions(run)
    return [
        cdfs.panel("Largest gap between tokens (MTPOT)", _largest_gap_s, lambda slo: slo.mtpot_s),
        cdfs.panel(
            "Normalised latency", lambda row: normalised_latency_of(row, run), x_label="E2E / execution time"
        ),
    ]


def state_panels(run: RunRecord) -> list[Panel]:
    """KV use, running and waiting requests of each engine over time; of many engines, mean and range."""
    if not run.samples:
        return []
    engines = sorted({sample.engine for sample in run.samples})
    groups = {
        f"engine {engine}": [sample for sample in run.samples if sample.engine == engine]
        for engine in engines
    }
    if len(engines) > MAX_NAMED:
        groups = {f"mean of {len(engines)} engines": list(run.samples)}
    time_axis = TimeAxis(run)

    def panel(title: str, y_label: str, value_of: Callable[[Sample], float], share: bool = False) -> Panel:
        return Panel(
            title=title,
            x_label=time_axis.label,
            y_label=y_label,
            series=[
                _over_time(label, time_axis, *columns(samples, value_of), colour=number)
                for number, (label, samples) in enumerate(groups.items())
            ],
            share=share,
            from_zero=True,
        )

    return [
        panel("KV pool in use", "of the pool", lambda sample: sample.kv_used, share=True),
        panel("Running requests", "requests", lambda sample: sample.running),
        panel("Waiting requests", "requests", lambda sample: sample.waiting),
    ]


def rate_panels(run: RunRecord) -> list[Panel]:
    """Requests and output tokens per second over time."""
    time_axis = TimeAxis(run)
    found = []
    if run.requests and time_axis.end_ns > time_axis.start_ns:
        events = {
            "arrivals": [row.arrival_ns for row in run.requests],
            "answered": [row.finish_ns for row in run.requests if row.answered],
            "goodput (answered within goals)": [row.finish_ns for row in run.requests if met_goals(row)],
        }
        bins = min(max(len(run.requests) // REQUESTS_PER_BIN, MIN_RATE_BINS), MAX_RATE_BINS)
        series = [
            Series(label, *_rates(times, time_axis, bins), line=True, colour=number)
            for number, (label, times) in enumerate(events.items())
            if times
        ]
        found.append(
            Panel(
                title="Arrivals, answers and goodput",
                x_label=time_axis.label,
                y_label="requests per second",
                series=series,
                from_zero=True,
            )
        )
    if run.samples:
        moments, total = sum_by_time(run.samples, lambda sample: sample.tokens_per_s)
        found.append(
            Panel(
                title="Output tokens",
                x_label=time_axis.label,
                y_label="tokens per second",
                series=[_over_time("tokens", time_axis, moments, total)],
                from_zero=True,
            )
        )
    return found


def cdf(values: Iterable[float], points: int = CDF_POINTS) -> tuple[list[float], list[float]]:
    """Cumulative distribution: sorted values, and the share of all values up to each.

    Thinned to at most ``points`` (2 or more), evenly by rank, keeping minimum and maximum.
    """
    ordered: Floats = np.sort(np.fromiter(values, np.float64))
    count = len(ordered)
    ranks = np.arange(count)
    if count > points:
        ranks = np.linspace(0, count - 1, points).round().astype(np.int64)
    return ordered[ranks].tolist(), ((ranks + 1) / max(count, 1)).tolist()


class _Distributions:
    """Distributions over the answered requests of a run."""

    def __init__(self, run: RunRecord) -> None:
        self._answered = [row for row in run.requests if row.answered]
        self._colours = service_colours(run)

    def panel(
        self,
        title: str,
        value_of: Callable[[RequestRow], float | None],
        goal_of: Callable[[SLO], float | None] = lambda slo: None,
        x_label: str | None = None,
    ) -> Panel:
        by_service: dict[str, list[float]] = {}
        for row in self._answered:
            value = value_of(row)
            if value is not None:
                by_service.setdefault(row.service, []).append(value)
        return distribution(title, by_service, self._colours, self._goals(goal_of), x_label)

    def _goals(self, goal_of: Callable[[SLO], float | None]) -> dict[str, float]:
        """The goals of services that are shown by name, where all requests of one have the same."""
        found: dict[str, set[float | None]] = {}
        for row in self._answered:
            found.setdefault(row.service, set()).add(goal_of(row.slo))
        alike = {name: goals.pop() for name, goals in found.items() if len(goals) == 1}
        return {name: goal for name in self._colours if (goal := alike.get(name)) is not None}


def distribution(
    title: str,
    by_name: Mapping[str, Sequence[float]],
    colours: Mapping[str, int],
    goals: Mapping[str, float],
    x_label: str | None = None,
    *,
    total: bool = True,
) -> Panel:
    """Cumulative distributions of values by name, and lines for goals.

    colours: of the names that are shown. x_label: of values that are no times; None: they are seconds.
    total: with several names, all values have a line, too.
    """
    values = [value for each in by_name.values() for value in each]
    low, middle, high = np.percentile(values, (1, 50, 99)) if values else (1.0, 1.0, 1.0)
    scale = 1e3 if x_label is None and middle < 0.5 else 1.0
    limits = [limit for limit in _limits(goals, colours) if low / GOAL_RANGE <= limit.x <= high * GOAL_RANGE]
    shown = [(name, by_name[name], colour) for name, colour in colours.items() if by_name.get(name)]
    if total and len(by_name) > 1:
        shown.append(("all", values, ALL_COLOUR))
    drawn = [low, high, *(limit.x for limit in limits)]
    return Panel(
        title=title,
        x_label=x_label or ("milliseconds" if scale == 1e3 else "seconds"),
        y_label="of requests",
        series=[_cdf_series(name, [value * scale for value in each], colour) for name, each, colour in shown],
        log_x=bool(low > 0 and max(drawn) > LOG_AXIS_RATIO * min(drawn)),
        share=True,
        limits=[replace(limit, x=limit.x * scale) for limit in limits],
    )


def _cdf_series(name: str, values: Sequence[float], colour: int) -> Series:
    x, y = cdf(values)
    # Between thinned points, a line is more accurate than steps.
    return Series(name, [x[0], *x], [0.0, *y], line=True, colour=colour, steps=len(values) <= CDF_POINTS)


def _limits(goals: Mapping[str, float], colours: Mapping[str, int]) -> list[Limit]:
    """A line for each goal; one for all services if it is the same."""
    if 1 < len(goals) == len(colours) and len(set(goals.values())) == 1:
        goal = next(iter(goals.values()))
        return [Limit(f"goal of each: {seconds(goal)}", goal, ALL_COLOUR)]
    whose = " of {}" if len(colours) > 1 else ""
    return [
        Limit(f"goal{whose.format(name)}: {seconds(goal)}", goal, colours[name])
        for name, goal in goals.items()
    ]


def _tpot_s(row: RequestRow) -> float | None:
    return row.tpot_s if row.output_tokens > 1 else None


def _largest_gap_s(row: RequestRow) -> float | None:
    return row.mtpot_s if row.output_tokens > 1 else None


def _over_time(label: str, time_axis: TimeAxis, times: Floats, values: Floats, colour: int = 0) -> Series:
    centres, lowest, mean, highest = downsample(times, values)
    band = (lowest.tolist(), highest.tolist()) if (lowest < highest).any() else None
    return Series(
        label, time_axis.to_units(centres).tolist(), mean.tolist(), line=True, colour=colour, band=band
    )


def _rates(times_ns: Sequence[int], time_axis: TimeAxis, bins: int) -> tuple[list[float], list[float]]:
    """Centres of ``bins`` equal intervals of the run, and events per second in each."""
    counts, edges = np.histogram(
        np.array(times_ns, dtype=np.float64), bins, (float(time_axis.start_ns), float(time_axis.end_ns))
    )
    width_s = (time_axis.end_ns - time_axis.start_ns) / 1e9 / bins
    return time_axis.to_units((edges[:-1] + edges[1:]) / 2).tolist(), (counts / width_s).tolist()
