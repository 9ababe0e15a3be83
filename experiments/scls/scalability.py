"""Throughput against the number of workers (SCLS, Fig. 22)."""

from experiments.padded.presets import static_preset
from experiments.pictures import line_panel
from experiments.registry import Reproduction
from experiments.result import Effort, Result, Row, Value
from experiments.scls.setup import ASSUMPTIONS, ENGINES, PAPER, QUICK_SECONDS, SECONDS, run_static

NAME = "scls-scalability"
WORKERS = (1, 2, 4, 6, 8)


def run(effort: Effort) -> Result:
    seconds = effort.choose(SECONDS, QUICK_SECONDS)
    points = [(engine, workers) for engine in ENGINES for workers in effort.choose(WORKERS, (1, 4, 8))]
    rows: list[Row] = []
    of_first: dict[str, float] = {}
    for engine, workers in effort.each(NAME, points):
        report = run_static(static_preset("scls", engine), engine, seconds=seconds, workers=workers).report
        of_first.setdefault(engine, report.requests_per_s)
        config: dict[str, Value] = {"engine": engine, "workers": workers}
        metrics: dict[str, Value] = {
            "throughput": report.requests_per_s,
            "speedup": report.requests_per_s / of_first[engine],
            "batch_size": report.mean_batch_size,
            "mean_response_s": report.response_mean_s,
        }
        rows.append(Row(config=config, metrics=metrics, paper={"speedup": workers}))
    panel = line_panel(
        rows, x="workers", y="throughput", by="engine", where={}, x_label="workers", y_label="requests/s"
    )
    return Result(
        name=NAME,
        paper=PAPER + ", Fig. 22",
        assumptions=[
            *ASSUMPTIONS,
            "The paper says that throughput grows linearly with the workers; its speedup is given as that.",
        ],
        rows=rows,
        panels=[[panel]],
    )


REPRODUCTION = Reproduction(
    name=NAME,
    paper="SCLS, Fig. 22",
    measures="throughput of SCLS on one to eight workers",
    run=run,
)
