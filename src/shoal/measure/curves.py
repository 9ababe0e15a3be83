"""Curves of a run: latency distributions (CDFs), KV use, requests and rates over time, as panels to draw."""

from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from shoal.measure.plots import Panel, Series
from shoal.measure.records import RequestRow, RunRecord, Sample
from shoal.measure.summary import met_goals, normalised_latency_of, run_window_ns

Floats = NDArray[np.float64]

CDF_POINTS = 500
TIME_POINTS = 200
MAX_RATE_BINS, MIN_RATE_BINS = 80, 8
REQUESTS_PER_BIN = 5
"""With fewer requests per bin, rates would be noise."""

MAX_LINES = 8
"""Services or engines that a panel shows by name, at most."""

LOG_AXIS_RATIO = 20.0
"""Ratio of 99th to 1st percentile above which times get a logarithmic axis."""

ALL_COLOUR = 9


def panels(run: RunRecord) -> list[Panel]:
    """All panels that are not empty."""
    return [panel for panel in (*latency_panels(run), *state_panels(run), *rate_panels(run)) if panel.series]


def latency_panels(run: RunRecord) -> list[Panel]:
    """Distributions over the answered requests of each service and, with several services, over all.

    Of many services, those with most answered requests are shown by name.
    """
    answered = [row for row in run.requests if row.answered]
    multi_token = [row for row in answered if row.output_tokens > 1]
    return [
        _cdf_panel("Time to first token (TTFT)", answered, lambda row: row.ttft_s),
        _cdf_panel("Time per output token (TPOT)", multi_token, lambda row: row.tpot_s),
        _cdf_panel("End-to-end latency (E2E)", answered, lambda row: row.e2e_s),
        _cdf_panel("Largest gap between tokens (MTPOT)", multi_token, lambda row: row.largest_gap_ns / 1e9),
        _cdf_panel(
            "Normalised latency",
            answered,
            lambda row: normalised_latency_of(row, run),
            "E2E / execution time",
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
    if len(engines) > MAX_LINES:
        groups = {f"mean of {len(engines)} engines": list(run.samples)}
    time_axis = _TimeAxis(run)

    def panel(title: str, y_label: str, value_of: Callable[[Sample], float], share: bool = False) -> Panel:
        return Panel(
            title=title,
            x_label=time_axis.label,
            y_label=y_label,
            series=[
                _over_time(label, time_axis, *_columns(samples, value_of), colour=number)
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
    time_axis = _TimeAxis(run)
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
        moments, total = _sum_by_time(run.samples, lambda sample: sample.tokens_per_s)
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


def downsample(times: Floats, values: Floats, points: int) -> tuple[Floats, Floats, Floats, Floats]:
    """A long curve in at most ``points`` bins: mean time, and lowest, mean and highest value of each.

    Equal times fall into the same bin, so several curves may be interleaved. The range shows the peak of a
    single sample, which the mean hides.
    """
    moments, bins = np.unique(times, return_inverse=True)
    count = min(points, len(moments))
    bins = bins * count // max(len(moments), 1)
    sizes = np.bincount(bins, minlength=count)
    lowest, highest = np.full(count, np.inf), np.full(count, -np.inf)
    np.minimum.at(lowest, bins, values)
    np.maximum.at(highest, bins, values)
    return np.bincount(bins, times) / sizes, lowest, np.bincount(bins, values) / sizes, highest


class _TimeAxis:
    """Time since the first arrival, in a unit that suits the length of the run."""

    def __init__(self, run: RunRecord) -> None:
        self.start_ns, self.end_ns = run_window_ns(run)
        length_s = (self.end_ns - self.start_ns) / 1e9
        unit, self.unit_ns = ("s", 1e9)
        if length_s > 5 * 3600:
            unit, self.unit_ns = ("h", 3600e9)
        elif length_s > 600:
            unit, self.unit_ns = ("min", 60e9)
        self.label = f"time since the first arrival, {unit}"

    def to_units(self, times_ns: Floats) -> Floats:
        return (times_ns - self.start_ns) / self.unit_ns


def _cdf_panel(
    title: str,
    rows: Sequence[RequestRow],
    value_of: Callable[[RequestRow], float | None],
    x_label: str | None = None,
) -> Panel:
    by_service: dict[str, list[float]] = {}
    for row in rows:
        value = value_of(row)
        if value is not None:
            by_service.setdefault(row.service, []).append(value)
    all_values = [value for values in by_service.values() for value in values]
    low, middle, high = np.percentile(all_values, (1, 50, 99)) if all_values else (1.0, 1.0, 1.0)
    scale = 1e3 if x_label is None and middle < 0.5 else 1.0
    busiest = sorted(by_service, key=lambda name: (-len(by_service[name]), name))[:MAX_LINES]
    lines = [(name, by_service[name], number) for number, name in enumerate(sorted(busiest))]
    if len(by_service) > 1:
        lines.append(("all", all_values, ALL_COLOUR))
    series = []
    for name, values, colour in lines:
        x, y = cdf([value * scale for value in values])
        # Between thinned points, a line is more accurate than steps.
        steps = len(values) <= CDF_POINTS
        series.append(Series(name, [x[0], *x], [0.0, *y], line=True, colour=colour, steps=steps))
    return Panel(
        title=title,
        x_label=x_label or ("milliseconds" if scale == 1e3 else "seconds"),
        y_label="of requests",
        series=series,
        log_x=bool(low > 0 and high > LOG_AXIS_RATIO * low),
        share=True,
    )


def _over_time(label: str, time_axis: _TimeAxis, times: Floats, values: Floats, colour: int = 0) -> Series:
    centres, lowest, mean, highest = downsample(times, values, TIME_POINTS)
    band = (lowest.tolist(), highest.tolist()) if (lowest < highest).any() else None
    return Series(
        label, time_axis.to_units(centres).tolist(), mean.tolist(), line=True, colour=colour, band=band
    )


def _sum_by_time(samples: Sequence[Sample], value_of: Callable[[Sample], float]) -> tuple[Floats, Floats]:
    times, values = _columns(samples, value_of)
    moments, positions = np.unique(times, return_inverse=True)
    return moments, np.bincount(positions, values).astype(np.float64)


def _columns(samples: Sequence[Sample], value_of: Callable[[Sample], float]) -> tuple[Floats, Floats]:
    times: Floats = np.array([sample.time_ns for sample in samples], dtype=np.float64)
    values: Floats = np.array([value_of(sample) for sample in samples], dtype=np.float64)
    return times, values


def _rates(times_ns: Sequence[int], time_axis: _TimeAxis, bins: int) -> tuple[list[float], list[float]]:
    """Centres of ``bins`` equal intervals of the run, and events per second in each."""
    counts, edges = np.histogram(
        np.array(times_ns, dtype=np.float64), bins, (float(time_axis.start_ns), float(time_axis.end_ns))
    )
    width_s = (time_axis.end_ns - time_axis.start_ns) / 1e9 / bins
    return time_axis.to_units((edges[:-1] + edges[1:]) / 2).tolist(), (counts / width_s).tolist()
