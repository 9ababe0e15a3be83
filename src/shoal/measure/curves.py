"""The curves of a run: distributions of its latencies, and its state over time, as panels to draw."""

from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from shoal.measure.plots import Panel, Series
from shoal.measure.records import RequestRow, RunRecord, Sample
from shoal.measure.summary import normalised, outcome, run_window_ns

Floats = NDArray[np.float64]

CDF_POINTS = 500
TIME_POINTS = 200
MOST_RATE_BINS, LEAST_RATE_BINS = 80, 8
REQUESTS_PER_BIN = 5
"""With fewer requests in a bin, rates would be noise."""

MOST_LINES = 8
"""Most services or engines that a panel shows by name."""

WIDE = 20.0
"""Times get a logarithmic axis if their 99th percentile is more than this many times their 1st."""

ALL_COLOUR = 9


def panels(run: RunRecord) -> list[Panel]:
    """Every panel that has something to show."""
    return [panel for panel in (*latency_panels(run), *state_panels(run), *rate_panels(run)) if panel.series]


def latency_panels(run: RunRecord) -> list[Panel]:
    """Distributions over the answered requests of each service, and over all where there are several.

    Where there are many services, those with most answers are shown by name.
    """
    answered = [row for row in run.requests if row.answered]
    multi_token = [row for row in answered if row.output_tokens > 1]
    return [
        _cdf_panel("Time to first token (TTFT)", answered, lambda row: row.ttft_s),
        _cdf_panel("Time per output token (TPOT)", multi_token, lambda row: row.tpot_s),
        _cdf_panel("End-to-end latency (E2E)", answered, lambda row: row.e2e_s),
        _cdf_panel("Largest gap between tokens (MTPOT)", multi_token, lambda row: row.largest_gap_ns / 1e9),
        _cdf_panel("Normalised latency", answered, lambda row: normalised(row, run), "E2E / execution time"),
    ]


def state_panels(run: RunRecord) -> list[Panel]:
    """Memory in use and requests in each engine over time; of many engines, their mean and range."""
    if not run.samples:
        return []
    engines = sorted({sample.engine for sample in run.samples})
    groups = {
        f"engine {engine}": [sample for sample in run.samples if sample.engine == engine]
        for engine in engines
    }
    if len(engines) > MOST_LINES:
        groups = {f"mean of {len(engines)} engines": list(run.samples)}
    clock = _Clock(run)

    def panel(title: str, y_label: str, value_of: Callable[[Sample], float], share: bool = False) -> Panel:
        return Panel(
            title=title,
            x_label=clock.label,
            y_label=y_label,
            series=[
                _over_time(label, clock, *_columns(samples, value_of), colour=number)
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
    clock = _Clock(run)
    found = []
    if run.requests and clock.end_ns > clock.start_ns:
        events = {
            "arrivals": [row.arrival_ns for row in run.requests],
            "answered": [row.finish_ns for row in run.requests if row.answered],
            "goodput (answered within goals)": [row.finish_ns for row in run.requests if outcome(row)],
        }
        bins = min(max(len(run.requests) // REQUESTS_PER_BIN, LEAST_RATE_BINS), MOST_RATE_BINS)
        series = [
            Series(label, *_rates(times, clock, bins), line=True, colour=number)
            for number, (label, times) in enumerate(events.items())
            if times
        ]
        found.append(
            Panel(
                title="Arrivals, answers and goodput",
                x_label=clock.label,
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
                x_label=clock.label,
                y_label="tokens per second",
                series=[_over_time("tokens", clock, moments, total)],
                from_zero=True,
            )
        )
    return found


def cdf(values: Iterable[float], points: int = CDF_POINTS) -> tuple[list[float], list[float]]:
    """Cumulative distribution: values in order, and the share of all that is at most each.

    Thinned to at most ``points`` (2 or more), evenly by rank; the least and the largest always stay.
    """
    ordered: Floats = np.sort(np.fromiter(values, np.float64))
    count = len(ordered)
    ranks = np.arange(count)
    if count > points:
        ranks = np.linspace(0, count - 1, points).round().astype(np.int64)
    return ordered[ranks].tolist(), ((ranks + 1) / max(count, 1)).tolist()


def stretches(times: Floats, values: Floats, points: int) -> tuple[Floats, Floats, Floats, Floats]:
    """A long curve as at most ``points`` stretches: mean time, and lowest, mean and highest value of each.

    Values of the same time fall into the same stretch, so several curves may come mixed. The range shows a
    peak of a single sample, which the mean hides.
    """
    moments, place = np.unique(times, return_inverse=True)
    count = min(points, len(moments))
    place = place * count // max(len(moments), 1)
    sizes = np.bincount(place, minlength=count)
    lowest, highest = np.full(count, np.inf), np.full(count, -np.inf)
    np.minimum.at(lowest, place, values)
    np.maximum.at(highest, place, values)
    return np.bincount(place, times) / sizes, lowest, np.bincount(place, values) / sizes, highest


class _Clock:
    """The run's time on an axis: from its first arrival, in the unit that suits its length."""

    def __init__(self, run: RunRecord) -> None:
        self.start_ns, self.end_ns = run_window_ns(run)
        length_s = (self.end_ns - self.start_ns) / 1e9
        unit, self.unit_ns = ("s", 1e9)
        if length_s > 5 * 3600:
            unit, self.unit_ns = ("h", 3600e9)
        elif length_s > 600:
            unit, self.unit_ns = ("min", 60e9)
        self.label = f"time since the first arrival, {unit}"

    def axis(self, times_ns: Floats) -> Floats:
        """Where times lie on the axis."""
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
    everything = [value for values in by_service.values() for value in values]
    low, middle, high = np.percentile(everything, (1, 50, 99)) if everything else (1.0, 1.0, 1.0)
    scale = 1e3 if x_label is None and middle < 0.5 else 1.0
    busiest = sorted(by_service, key=lambda name: (-len(by_service[name]), name))[:MOST_LINES]
    lines = [(name, by_service[name], number) for number, name in enumerate(sorted(busiest))]
    if len(by_service) > 1:
        lines.append(("all", everything, ALL_COLOUR))
    series = []
    for name, values, colour in lines:
        x, y = cdf([value * scale for value in values])
        every = len(values) <= CDF_POINTS  # a line between thinned points is nearer to the truth than steps
        series.append(Series(name, [x[0], *x], [0.0, *y], line=True, colour=colour, steps=every))
    return Panel(
        title=title,
        x_label=x_label or ("milliseconds" if scale == 1e3 else "seconds"),
        y_label="of requests",
        series=series,
        log_x=bool(low > 0 and high > WIDE * low),
        share=True,
    )


def _over_time(label: str, clock: _Clock, times: Floats, values: Floats, colour: int = 0) -> Series:
    where, lowest, mean, highest = stretches(times, values, TIME_POINTS)
    band = (lowest.tolist(), highest.tolist()) if (lowest < highest).any() else None
    return Series(label, clock.axis(where).tolist(), mean.tolist(), line=True, colour=colour, band=band)


def _sum_by_time(samples: Sequence[Sample], value_of: Callable[[Sample], float]) -> tuple[Floats, Floats]:
    times, values = _columns(samples, value_of)
    moments, place = np.unique(times, return_inverse=True)
    return moments, np.bincount(place, values).astype(np.float64)


def _columns(samples: Sequence[Sample], value_of: Callable[[Sample], float]) -> tuple[Floats, Floats]:
    times: Floats = np.array([sample.time_ns for sample in samples], dtype=np.float64)
    values: Floats = np.array([value_of(sample) for sample in samples], dtype=np.float64)
    return times, values


def _rates(times_ns: Sequence[int], clock: _Clock, bins: int) -> tuple[list[float], list[float]]:
    """Events per second in each of ``bins`` equal stretches of the run, at their middles."""
    counts, edges = np.histogram(
        np.array(times_ns, dtype=np.float64), bins, (float(clock.start_ns), float(clock.end_ns))
    )
    width_s = (clock.end_ns - clock.start_ns) / 1e9 / bins
    return clock.axis((edges[:-1] + edges[1:]) / 2).tolist(), (counts / width_s).tolist()
