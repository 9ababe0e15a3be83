"""Throughput, batches, waste and early returns against the slice length (SCLS, Figs. 18 to 21)."""

from collections.abc import Sequence
from dataclasses import replace

from experiments.padded.presets import static_preset
from experiments.pictures import line_panel
from experiments.registry import Reproduction
from experiments.result import Effort, Result, Row, Value, between
from experiments.scls.setup import (
    ASSUMPTIONS,
    ENGINES,
    PAPER,
    QUICK_SECONDS,
    SECONDS,
    figures,
    run_static,
)
from shoal.measure import Panel

NAME = "scls-slice-length"
LENGTHS = (32, 64, 128, 256, 512, 1024)
PAPER_LENGTH = 128


def run(effort: Effort) -> Result:
    seconds = effort.choose(SECONDS, QUICK_SECONDS)
    points = [(engine, length) for engine in ENGINES for length in LENGTHS]
    rows: list[Row] = []
    for engine, length in effort.each(NAME, points):
        options = replace(static_preset("scls", engine), slice_tokens=length)
        found = run_static(options, engine, seconds=seconds)
        report = found.report
        mean_slices = sum(number * count for number, count in report.slices.items()) / report.requests
        metrics = figures(found) | {
            "slices": mean_slices,
            "early_return_ratio": report.early_return_ratio,
            "completion_std_s": report.worker_completion_std_s,
        }
        config: dict[str, Value] = {"engine": engine, "slice_tokens": length}
        paper = between("early_return_ratio", 0.0, 0.01) if length == PAPER_LENGTH else None
        rows.append(Row(config=config, metrics=metrics, paper=paper))
    return Result(
        name=NAME,
        paper=PAPER + ", Figs. 18 to 21",
        assumptions=[
            *ASSUMPTIONS,
            "The paper draws these curves without printing them: throughput rises and then falls with the "
            "slice length, batches shrink, invalid tokens and early returns grow, pad tokens and slices "
            "fall.",
        ],
        rows=rows,
        panels=[_panels(rows, engine) for engine in ENGINES],
    )


def _panels(rows: Sequence[Row], engine: str) -> list[Panel]:
    shown = {
        "throughput": "requests/s",
        "batch_size": "requests in a batch",
        "invalid_tokens": "invalid tokens of a request",
    }
    return [
        line_panel(
            rows,
            x="slice_tokens",
            y=metric,
            by="engine",
            where={"engine": engine},
            x_label="slice length (tokens)",
            y_label=label,
        )
        for metric, label in shown.items()
    ]


REPRODUCTION = Reproduction(
    name=NAME,
    paper="SCLS, Figs. 18 to 21",
    measures="throughput, batches, waste and early returns against the length of a slice",
    run=run,
)
