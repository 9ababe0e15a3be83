"""What each service has of the engines over time, on top of each other, with events: as panels to draw.

Samples of engines tell waiting and running requests and KV. A run without samples, as a client measures it,
has requests without a first token, and those whose tokens come.
"""

from collections.abc import Callable, Mapping

import numpy as np

from shoal.measure.plots import Marks, Panel, Series
from shoal.measure.records import RequestRow, RunRecord, ServiceSample
from shoal.measure.service_colours import OTHERS_COLOUR, service_colours
from shoal.measure.time_axis import TIME_POINTS, Floats, TimeAxis, downsample, sum_by_time

MARK_PLACES = 80
"""Marks of one kind along a time axis, at most."""

_KINDS = {
    "preempted": ("preemptions", "v"),
    "moved": ("requests moved", "D"),
    "died": ("engine died", "X"),
    "drained": ("engine drained", "s"),
}
"""By ``Event.kind``: name in the legend, and shape of the mark."""


def stacks_by_service(run: RunRecord) -> list[Panel]:
    """Panels of running and waiting requests and KV in use, or of what a client knows of its requests."""
    if any(sample.services for sample in run.samples):
        return _of_samples(run)
    return [] if run.samples else _of_requests(run)


def marks(run: RunRecord, time_axis: TimeAxis) -> list[Marks]:
    """Events by kind, with how many there were; marks that would lie on each other are one."""
    found = []
    for kind, (label, shape) in _KINDS.items():
        events = [event for event in run.events if event.kind == kind]
        if not events:
            continue
        times: Floats = np.array([event.time_ns for event in events], dtype=np.float64)
        width_ns = max(time_axis.end_ns - time_axis.start_ns, 1) / MARK_PLACES
        places = np.unique(np.floor((times - time_axis.start_ns) / width_ns))
        x = time_axis.to_units(time_axis.start_ns + (places + 0.5) * width_ns)
        count = sum(event.count for event in events)
        found.append(Marks(f"{label} ({count:,})", x.tolist(), shape))
    return found


def _of_samples(run: RunRecord) -> list[Panel]:
    time_axis = TimeAxis(run)
    engines = len({sample.engine for sample in run.samples})
    events = marks(run, time_axis)
    names = sorted({name for sample in run.samples for name in sample.services})
    moments, _ = sum_by_time(run.samples, lambda sample: 0)

    def panel(
        title: str, y_label: str, value_of: Callable[[ServiceSample], float], share: bool = False
    ) -> Panel:
        def total(name: str) -> Floats:
            return sum_by_time(run.samples, lambda sample: value_of(sample.services.get(name, _NOTHING)))[1]

        by_service = {name: total(name) for name in names}
        if share:
            by_service = {name: values / engines for name, values in by_service.items()}
        return Panel(
            title=title,
            x_label=time_axis.label,
            y_label=y_label,
            series=_stack(run, time_axis, moments, by_service),
            share=share,
            from_zero=True,
            stacked=True,
            marks=events,
        )

    pool = "of the pool" if engines == 1 else f"of {engines} pools"
    return [
        panel("Running requests", "requests", lambda each: each.running),
        panel("Waiting requests", "requests", lambda each: each.waiting),
        panel("KV pool in use", pool, lambda each: each.kv_used, share=True),
    ]


_NOTHING = ServiceSample(0, 0, 0.0)


def _of_requests(run: RunRecord) -> list[Panel]:
    time_axis = TimeAxis(run)
    if time_axis.end_ns <= time_axis.start_ns:
        return []
    moments = np.linspace(time_axis.start_ns, time_axis.end_ns, TIME_POINTS)
    names = sorted({row.service for row in run.requests})

    def panel(title: str, span_of: Callable[[RequestRow], tuple[int, int]]) -> Panel:
        counts = {}
        for name in names:
            spans = np.array([span_of(row) for row in run.requests if row.service == name], dtype=np.int64)
            begun, ended = (np.sort(spans[:, side]) for side in (0, 1))
            present = np.searchsorted(begun, moments, "right") - np.searchsorted(ended, moments, "right")
            counts[name] = present.astype(np.float64)
        return Panel(
            title=title,
            x_label=time_axis.label,
            y_label="requests",
            series=_stack(run, time_axis, moments, counts),
            from_zero=True,
            stacked=True,
        )

    return [
        panel("Waiting for the first token", lambda row: (row.arrival_ns, row.first_token_ns)),
        panel("Receiving tokens", lambda row: (row.first_token_ns, row.finish_ns)),
    ]


def _stack(
    run: RunRecord, time_axis: TimeAxis, moments: Floats, values: Mapping[str, Floats]
) -> list[Series]:
    """One area for each service that is shown by name, and one for the others."""
    colours = service_colours(run)
    areas = [(name, values[name], colours[name]) for name in sorted(colours) if name in values]
    others = [values[name] for name in values if name not in colours]
    if others:
        areas.append((f"{len(others)} others", np.sum(others, axis=0), OTHERS_COLOUR))
    return [_area(name, time_axis, moments, each, number) for name, each, number in areas]


def _area(name: str, time_axis: TimeAxis, moments: Floats, values: Floats, colour: int) -> Series:
    centres, _, mean, _ = downsample(moments, values)
    return Series(name, time_axis.to_units(centres).tolist(), mean.tolist(), line=True, colour=colour)
