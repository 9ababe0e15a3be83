"""Fidelity of a simulation: its latencies compared with a measured run, as table, JSON and picture."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from shoal.core import RequestRecord
from shoal.measure.curves import cdf
from shoal.measure.plots import Panel, Series, save_plot
from shoal.measure.summary import Spread
from shoal.measure.tables import Grid, seconds

_TIMES = (("TTFT", "ttft_s"), ("TPOT", "tpot_s"), ("E2E", "e2e_s"))
_FIGURES = ("mean", "p50", "p99")
_TITLES = {"TTFT": "Time to first token", "TPOT": "Time per output token", "E2E": "End-to-end latency"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One figure of one latency, measured and simulated."""

    time: str
    """TTFT, TPOT or E2E."""
    figure: str
    """mean, p50 or p99."""
    measured_s: float
    simulated_s: float
    faster_s: float
    """Simulated, if every step took 1% less."""
    slower_s: float
    """Simulated, if every step took 1% more."""

    @property
    def difference(self) -> float:
        """Relative error of the simulation."""
        return _relative_change(self.simulated_s, self.measured_s)

    @property
    def band(self) -> tuple[float, float]:
        """Relative changes of the simulated figure with steps 1% faster and 1% slower."""
        return (
            _relative_change(self.faster_s, self.simulated_s),
            _relative_change(self.slower_s, self.simulated_s),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A measured run and its simulation."""

    rows: Sequence[Compared]
    measured: Sequence[RequestRecord]
    """Requests that both runs answered, as measured."""
    simulated: Sequence[RequestRecord]
    """The same requests as simulated, in the same order."""
    left_out: int
    """Measured requests that were not answered in simulation."""

    def grid(self) -> Grid:
        rows = [
            [
                row.time if row.figure == _FIGURES[0] else "",
                row.figure,
                seconds(row.measured_s),
                seconds(row.simulated_s),
                _percent(row.difference),
                " ".join(map(_percent, row.band)),
            ]
            for row in self.rows
        ]
        return Grid(
            title=f"Measured and simulated, {len(self.measured):,} requests",
            heads=["time", "", "measured", "simulated", "difference", "1% of step time"],
            rows=rows,
            words=2,
        )

    def panels(self) -> list[Panel]:
        """Cumulative distributions of both runs, one panel for each latency."""
        return [
            Panel(
                title=_TITLES[time],
                x_label="seconds",
                y_label="of requests",
                series=[
                    Series(label, *cdf(_values(records, field)), line=True, colour=colour)
                    for colour, (label, records) in enumerate(
                        (("measured", self.measured), ("simulated", self.simulated))
                    )
                ],
                share=True,
            )
            for time, field in _TIMES
            if _values(self.measured, field)
        ]

    def draw(self, path: Path, title: str = "") -> None:
        """Write the picture; raises ConfigError as ``save_plot``."""
        save_plot(path, [self.panels()], title)

    def write(self, path: Path) -> None:
        plain = [asdict(row) | {"difference": row.difference, "band": row.band} for row in self.rows]
        found = {"requests": len(self.measured), "left_out": self.left_out, "figures": plain}
        text = json.dumps(found, indent=2)
        path.write_text(text + "\n", encoding="utf-8", newline="\n")


def compare_with_measured(
    measured: Sequence[RequestRecord],
    simulated: Sequence[RequestRecord],
    faster: Sequence[RequestRecord],
    slower: Sequence[RequestRecord],
) -> Comparison:
    """Compare the requests that are in all runs, by id.

    faster, slower: simulations with steps 1% faster and 1% slower. TPOT needs responses of two tokens.
    """
    runs = [{record.request_id: record for record in run} for run in (simulated, faster, slower)]
    both = [record for record in measured if all(record.request_id in run for run in runs)]
    matched = [[run[record.request_id] for record in both] for run in runs]
    return Comparison(
        rows=list(_compared([both, *matched])),
        measured=both,
        simulated=matched[0],
        left_out=len(measured) - len(both),
    )


def _compared(runs: Sequence[Sequence[RequestRecord]]) -> Iterator[Compared]:
    for time, field in _TIMES:
        spreads = [Spread.of(_values(records, field)) for records in runs]
        for figure in _FIGURES:
            found = [getattr(spread, figure) for spread in spreads if spread is not None]
            if len(found) == len(runs):
                names = ("measured_s", "simulated_s", "faster_s", "slower_s")
                yield Compared(time=time, figure=figure, **dict(zip(names, found, strict=True)))


def _values(records: Sequence[RequestRecord], field: str) -> list[float]:
    return [getattr(record, field) for record in records if field != "tpot_s" or record.output_tokens > 1]


def _relative_change(value: float, base: float) -> float:
    return value / base - 1 if base else 0.0


def _percent(value: float) -> str:
    return f"{value:+.1%}"
