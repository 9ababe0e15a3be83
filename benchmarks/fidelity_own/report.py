"""Tables and JSON of `benchmarks.fidelity_own`: measured and simulated figures side by side."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np
from rich.table import Table

from benchmarks.fidelity_own.run import Outcome
from shoal.core import RequestRecord, normalised_latency, percentile
from shoal.forecast import StepTimes
from shoal.profile.measure import ServiceMeasurements

Metric = Callable[[RequestRecord, Mapping[str, float]], float]
METRICS: Mapping[str, Metric] = {
    "E2E": lambda one, _: one.e2e_s,
    "TTFT": lambda one, _: one.ttft_s,
    "TPOT": lambda one, _: one.tpot_s,
    "normalised": lambda one, execution_s: normalised_latency(one, execution_s[one.service]),
}
GOALS = {"E2E": 0.03, "TTFT": 0.05, "TPOT": 0.03, "normalised": 0.03}
"""Largest relative difference of a simulated mean."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One run, measured and simulated.

    times: of the simulation's steps. paced: simulated at the run's own pace. varied: simulated with random
    jitter. sheet: step times of the data sheet alone. by_sheet: simulated with these.
    """

    case: str
    preset: str
    seed: int
    measured: Outcome
    simulated: Outcome
    paced: Outcome
    varied: Sequence[Outcome]
    times: StepTimes
    sheet: StepTimes
    by_sheet: Outcome
    execution_s: Mapping[str, float]


@dataclass(frozen=True)
class Figure:
    """One metric of one preset: means over its runs, in seconds (normalised: without unit).

    paced: simulated at the run's pace. spread: lowest and highest difference of single runs.
    chance: relative standard deviation of the simulated figure under random jitter.
    """

    metric: str
    kind: str
    measured: float
    simulated: float
    paced: float
    spread: tuple[float, float]
    chance: float

    @property
    def difference(self) -> float:
        """Relative, of the simulated figure from the measured one."""
        return self.simulated / self.measured - 1

    @property
    def verdict(self) -> str:
        """Whether a mean is within its goal; empty for other figures."""
        goal = GOALS.get(self.metric) if self.kind == "mean" else None
        if goal is None:
            return ""
        return f"within {goal:.0%}" if abs(self.difference) <= goal else f"OVER {goal:.0%}"


def figures(runs: Sequence[Comparison]) -> list[Figure]:
    return [
        _figure(metric, kind, runs)
        for metric in METRICS
        for kind in ("mean", *(("p99",) if metric != "normalised" else ()))
    ]


def _figure(metric: str, kind: str, runs: Sequence[Comparison]) -> Figure:
    def value(outcome: Outcome, execution_s: Mapping[str, float]) -> float:
        values = [METRICS[metric](one, execution_s) for one in outcome.records]
        return fmean(values) if kind == "mean" else percentile(values, 99)

    values = [
        [value(outcome, run.execution_s) for outcome in (run.measured, run.simulated, run.paced)]
        for run in runs
    ]
    differences = [simulated / measured - 1 for measured, simulated, _ in values]
    measured, simulated, paced = (fmean(side) for side in zip(*values, strict=True))
    varied = [
        [value(outcome, run.execution_s) for outcome in run.varied] for run in runs if len(run.varied) > 1
    ]
    chance = np.sqrt(sum(np.var(values, ddof=1) for values in varied)) / len(runs) / simulated
    return Figure(
        metric, kind, measured, simulated, paced, (min(differences), max(differences)), float(chance)
    )


def presets_of(runs: Sequence[Comparison]) -> dict[str, list[Comparison]]:
    """Runs by preset."""
    found: dict[str, list[Comparison]] = {}
    for run in runs:
        found.setdefault(run.preset, []).append(run)
    return found


def results_table(case: str, runs: Sequence[Comparison]) -> Table:
    table = Table(
        title=f"{case}: the real engine and the simulator, means and 99th percentiles",
        title_justify="left",
        caption="chance: standard deviation of the simulated figure with random step times, which vary by\n"
        "the mean error of the fit; at its pace: the difference with simulated steps scaled by the\n"
        "run's own around the same time, without the machine's part",
        caption_justify="left",
    )
    table.add_column("preset", no_wrap=True)
    table.add_column("metric", no_wrap=True)
    for column in ("measured", "simulated", "difference", "of single runs", "chance", "at its pace"):
        table.add_column(column, justify="right")
    table.add_column("goal")
    for preset, of_preset in presets_of(runs).items():
        for number, one in enumerate(figures(of_preset)):
            spread = f"{one.spread[0]:+.1%} to {one.spread[1]:+.1%}" if len(of_preset) > 1 else ""
            table.add_row(
                preset if number == 0 else "",
                one.metric if one.kind == "mean" else f"{one.metric} p99",
                _amount(one, one.measured),
                _amount(one, one.simulated),
                f"{one.difference:+.2%}",
                spread,
                f"±{one.chance:.1%}",
                f"{one.paced / one.measured - 1:+.1%}",
                one.verdict,
            )
        table.add_section()
    return table


def _amount(one: Figure, value: float) -> str:
    if one.metric == "normalised":
        return f"{value:.3f}"
    return f"{value * 1e3:.2f} ms" if one.metric == "TPOT" else f"{value:.3f} s"


def steps_table(runs: Sequence[Comparison]) -> Table:
    """Times of each run's steps, measured and by the fit; preemptions; end times."""
    table = Table(
        title="Times of the same steps, measured and by the fit",
        title_justify="left",
        caption="If these differ, the fit or the machine is the cause; if they agree, the queue is.",
        caption_justify="left",
    )
    for column in ("case", "preset", "seed"):
        table.add_column(column, no_wrap=True)
    columns = ("decodes", "off", "prompts", "off", "all", "rows", "preemptions", "ended, s")
    for column in columns:
        table.add_column(column, justify="right")
    for run in runs:
        decodes = [step for step in run.measured.steps if not step[0].chunks]
        others = [step for step in run.measured.steps if step[0].chunks]
        measured, simulated = run.measured.counts, run.simulated.counts
        table.add_row(
            run.case,
            run.preset,
            str(run.seed),
            f"{sum(seconds for _, seconds in decodes):.1f} s",
            f"{relative_error(run.times, decodes):+.1%}",
            f"{sum(seconds for _, seconds in others):.1f} s",
            f"{relative_error(run.times, others):+.1%}",
            f"{relative_error(run.times, run.measured.steps):+.1%}",
            f"{fmean(rows.decodes + len(rows.chunks) for rows, _ in run.measured.steps):.1f}",
            f"{measured.preemptions}, {simulated.preemptions}",
            f"{measured.end_s:.0f}, {simulated.end_s:.0f}",
        )
    return table


def sheet_table(runs: Sequence[Comparison]) -> Table:
    """Differences of means simulated with the data sheet alone."""
    table = Table(title="The roofline of the data sheet alone, against the real engine", title_justify="left")
    for column in ("case", "preset", "seed"):
        table.add_column(column, no_wrap=True)
    for column in (*METRICS, "steps"):
        table.add_column(column, justify="right")
    for run in runs:
        means = [
            [fmean(metric(one, run.execution_s) for one in outcome.records) for metric in METRICS.values()]
            for outcome in (run.by_sheet, run.measured)
        ]
        differences = [f"{simulated / measured - 1:+.1%}" for simulated, measured in zip(*means, strict=True)]
        steps = f"{relative_error(run.sheet, run.measured.steps):+.1%}"
        table.add_row(run.case, run.preset, str(run.seed), *differences, steps)
    return table


def relative_error(times: StepTimes, steps: Sequence[tuple[Any, float]]) -> float:
    """Relative error of the seconds that ``times`` gives for all of ``steps``."""
    took = sum(seconds for _, seconds in steps)
    return sum(times.step_time(rows) for rows, _ in steps) / took - 1 if took else 0.0


@dataclass(frozen=True)
class Drift:
    """Relative change of step times between two profiles: median, 10th and 90th percentile."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:+.1%} (median; 80% of them {self.low:+.1%} to {self.high:+.1%})"


def drift_of(before: ServiceMeasurements, after: ServiceMeasurements) -> Drift:
    """The drift of the steps that both profiles have."""
    known = {(one.rows, one.equal): one.seconds for one in before.steps}
    ratios = [
        one.seconds / known[one.rows, one.equal] - 1 for one in after.steps if (one.rows, one.equal) in known
    ]
    return Drift(*np.percentile(ratios, [50, 10, 90]).tolist())


def http_table(inside: Sequence[RequestRecord], served: Sequence[RequestRecord]) -> Table:
    table = Table(
        title="HTTP's share: the same requests to `shoal serve` on loopback",
        title_justify="left",
        caption="The API process and this client use the same cores as the engine; a machine with more\n"
        "cores shows less.",
        caption_justify="left",
    )
    table.add_column("metric")
    for column in ("in process", "over HTTP", "difference", ""):
        table.add_column(column, justify="right")
    for name in ("E2E", "TTFT", "TPOT"):
        one, other = (fmean(METRICS[name](r, {}) for r in records) for records in (inside, served))
        table.add_row(
            f"{name} mean",
            f"{one * 1e3:.1f} ms",
            f"{other * 1e3:.1f} ms",
            f"{(other - one) * 1e3:+.1f} ms",
            f"{other / one - 1:+.1%}",
        )
    return table


def to_json(
    runs: Sequence[Comparison],
    drifts: Sequence[Drift],
    served: tuple[Sequence[RequestRecord], Sequence[RequestRecord]] | None,
) -> dict[str, Any]:
    """All figures of the tables."""
    cases = []
    for case in dict.fromkeys(run.case for run in runs):
        for preset, of_preset in presets_of([run for run in runs if run.case == case]).items():
            metrics = {
                f"{one.metric} {one.kind}": {
                    "measured": one.measured,
                    "simulated": one.simulated,
                    "simulated_at_its_pace": one.paced,
                    "difference": one.difference,
                    "of_single_runs": one.spread,
                    "chance": one.chance,
                }
                for one in figures(of_preset)
            }
            steps = [relative_error(run.times, run.measured.steps) for run in of_preset]
            cases.append({"case": case, "preset": preset, "metrics": metrics, "steps_off": steps})
    share = None
    if served is not None:
        share = {
            name: [fmean(METRICS[name](r, {}) for r in records) for records in served]
            for name in ("E2E", "TTFT", "TPOT")
        }
    return {
        "results": cases,
        "drift": [[drift.median, drift.low, drift.high] for drift in drifts],
        "http_in_process_and_served_s": share,
    }
