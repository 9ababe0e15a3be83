"""Load balance between workers, slices per request and early returns (SCLS, Figs. 14 and 17)."""

from experiments.padded.presets import static_preset
from experiments.padded.report import StaticReport
from experiments.pictures import line_panel
from experiments.registry import Reproduction
from experiments.result import Effort, Result, Row, Value, between
from experiments.scls.ils import ILS_ASSUMPTIONS, ils_completion_std_s, run_ils
from experiments.scls.setup import (
    ASSUMPTIONS,
    ENGINES,
    PAPER,
    QUICK_SECONDS,
    RATES,
    SECONDS,
    run_static,
)

NAME = "scls-balance"
MANY_SLICES = 4

DIFFERS = (
    "Differs: ILS is balanced as well as SCLS here. Its engines keep up with the arrivals (see "
    "scls-throughput), so each ends soon after its last request; the imbalance that the paper shows comes "
    "from queues.",
    "Differs: SCLS's deviation is larger at 10 per second than at 20. Without a backlog it depends on which "
    "worker has the last slices, not on the offloader.",
)


def run(effort: Effort) -> Result:
    seconds = effort.choose(SECONDS, QUICK_SECONDS)
    rates = effort.choose((RATES[0], RATES[-1]), RATES[-1:])
    points = [
        (engine, rate, name)
        for engine in ENGINES
        for rate in rates
        for name in ("sls", "ils", "scls")
        if name != "ils" or engine == "ds"
    ]
    rows: list[Row] = []
    for engine, rate, name in effort.each(NAME, points):
        config: dict[str, Value] = {"engine": engine, "rate": rate, "scheduler": name}
        metrics: dict[str, Value]
        if name == "ils":
            metrics = {"completion_std_s": ils_completion_std_s(run_ils(rate=rate, seconds=seconds))}
        else:
            metrics = _figures(
                run_static(static_preset(name, engine), engine, rate=rate, seconds=seconds).report
            )
        paper = between("early_return_ratio", 0.0, 0.01) if name == "scls" else None
        rows.append(Row(config=config, metrics=metrics, paper=paper))
    panels = [
        line_panel(
            rows,
            x="rate",
            y="completion_std_s",
            by="scheduler",
            where={"engine": engine},
            x_label="requests/s that arrive",
            y_label="std of completion times (s)",
            title=engine,
        )
        for engine in ENGINES
    ]
    return Result(
        name=NAME,
        paper=PAPER + ", Figs. 14 and 17",
        assumptions=[
            *ASSUMPTIONS,
            *ILS_ASSUMPTIONS[:1],
            "The paper draws completion times and slices without printing them: SCLS has the smallest "
            "standard deviation of all, and the vast majority of requests end within three slices.",
            *DIFFERS,
        ],
        rows=rows,
        panels=[panels],
    )


def _figures(report: StaticReport) -> dict[str, Value]:
    shares: dict[str, Value] = {
        f"share_in_{number}": report.slices.get(number, 0) / report.requests
        for number in range(1, MANY_SLICES)
    }
    more = sum(count for number, count in report.slices.items() if number >= MANY_SLICES)
    return {
        "completion_std_s": report.worker_completion_std_s,
        "early_return_ratio": report.early_return_ratio,
        "estimate_error": report.estimate_error,
        **shares,
        f"share_in_{MANY_SLICES}_or_more": more / report.requests,
    }


REPRODUCTION = Reproduction(
    name=NAME,
    paper="SCLS, Figs. 14 and 17",
    measures="deviation of the workers' completion times, slices per request, early returns",
    run=run,
)
