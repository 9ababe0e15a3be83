"""Result files of a run: summary.json, requests.jsonl, requests.csv, samples.csv; list of all formats."""

import csv
import json
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path

from shoal.core import ConfigError
from shoal.measure.chrome_trace import write_trace
from shoal.measure.html_report import write_report
from shoal.measure.plots import require_plots
from shoal.measure.records import RequestRow, RunRecord
from shoal.measure.summary import met_goals, normalised_latency_of, summarise

Cell = str | int | float | bool | None

REQUEST_COLUMNS = (
    "request_id",
    "service",
    "engine",
    "finish",
    "error",
    "arrival_s",
    "first_token_s",
    "finish_s",
    "ttft_s",
    "tpot_s",
    "e2e_s",
    "largest_gap_s",
    "normalised_latency",
    "prompt_tokens",
    "output_tokens",
    "cached_tokens",
    "preemptions",
    "recomputed_tokens",
    "slo_ttft_s",
    "slo_tpot_s",
    "slo_mtpot_s",
    "slo_e2e_s",
    "slo_met",
    "tokens_on_time",
)
"""Columns of requests.jsonl and requests.csv, one row for each request, in order of their ends.

Times are seconds on the run's clock, to the nanosecond. Cells are null (empty in CSV) for first_token_s and
ttft_s without tokens, tpot_s and largest_gap_s below two tokens, normalised_latency of unanswered requests or
services without an execution time, missing goals, slo_met without goals or after a cancellation, and
tokens_on_time unless there are goals for the first token and for the others. e2e_s is from arrival to any
kind of end. slo_met is true or false, also in CSV.
"""

SAMPLE_COLUMNS = ("time_s", "engine", "waiting", "running", "kv_used", "tokens_per_s")
"""Columns of samples.csv, one row for each ``Sample``."""


def write_run(run: RunRecord, folder: Path, *, formats: Collection[str] | None = None) -> list[Path]:
    """Write a run's files into ``folder``, which is created if missing; returns their paths.

    formats: names from ``FORMATS``; None means all. The same run gives the same bytes. Raises ConfigError
    for an unknown format, for ``html`` without matplotlib (before anything is written), and for a file that
    cannot be written.
    """
    wanted = list(FORMATS) if formats is None else [name for name in FORMATS if name in formats]
    unknown = sorted(set(formats or ()) - set(FORMATS))
    if unknown:
        raise ConfigError(f"unknown output format {', '.join(unknown)}; there are: {', '.join(FORMATS)}")
    if "html" in wanted:
        require_plots()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        paths = []
        for name in wanted:
            file_name, write = FORMATS[name]
            write(run, folder / file_name)
            paths.append(folder / file_name)
    except OSError as error:
        raise ConfigError(f"cannot write the results of a run to {folder}: {error}") from error
    return paths


def request_cells(row: RequestRow, run: RunRecord) -> dict[str, Cell]:
    """One request by ``REQUEST_COLUMNS``."""
    has_token, multi_token = row.output_tokens > 0, row.output_tokens > 1
    latency = normalised_latency_of(row, run)
    cells: tuple[Cell, ...] = (
        row.request_id,
        row.service,
        row.engine,
        row.finish,
        row.error,
        row.arrival_ns / 1e9,
        row.first_token_ns / 1e9 if has_token else None,
        row.finish_ns / 1e9,
        row.ttft_s if has_token else None,
        round(row.tpot_s, 9) if multi_token else None,
        row.e2e_s,
        row.mtpot_s if multi_token else None,
        None if latency is None else round(latency, 9),
        row.prompt_tokens,
        row.output_tokens,
        row.cached_tokens,
        row.preemptions,
        row.recomputed_tokens,
        row.slo.ttft_s,
        row.slo.tpot_s,
        row.slo.mtpot_s,
        row.slo.e2e_s,
        met_goals(row),
        row.tokens_on_time,
    )
    return dict(zip(REQUEST_COLUMNS, cells, strict=True))


def write_requests_jsonl(run: RunRecord, path: Path) -> None:
    with path.open("w", encoding="utf-8", newline="\n") as file:
        for row in run.requests:
            file.write(json.dumps(request_cells(row, run), ensure_ascii=False, allow_nan=False) + "\n")


def write_requests_csv(run: RunRecord, path: Path) -> None:
    _write_csv(path, REQUEST_COLUMNS, (request_cells(row, run).values() for row in run.requests))


def write_samples(run: RunRecord, path: Path) -> None:
    _write_csv(path, SAMPLE_COLUMNS, _sample_rows(run))


def write_summary(run: RunRecord, path: Path) -> None:
    """Write ``Summary.to_dict`` and the run's facts as JSON."""
    plain = {"title": run.title, "facts": dict(run.facts)} | summarise(run).to_dict()
    text = json.dumps(plain, ensure_ascii=False, allow_nan=False, indent=2)
    path.write_text(text + "\n", encoding="utf-8", newline="\n")


FORMATS: dict[str, tuple[str, Callable[[RunRecord, Path], None]]] = {
    "summary": ("summary.json", write_summary),
    "jsonl": ("requests.jsonl", write_requests_jsonl),
    "csv": ("requests.csv", write_requests_csv),
    "samples": ("samples.csv", write_samples),
    "trace": ("trace.json", write_trace),
    "html": ("report.html", write_report),
}
"""By format: file name and writer. ``html`` needs the extra ``plots``."""


def _sample_rows(run: RunRecord) -> Iterator[tuple[Cell, ...]]:
    for sample in run.samples:
        yield (
            sample.time_ns / 1e9,
            sample.engine,
            sample.waiting,
            sample.running,
            round(sample.kv_used, 9),
            round(sample.tokens_per_s, 9),
        )


def _write_csv(path: Path, columns: Iterable[str], rows: Iterable[Iterable[Cell]]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows([_csv_text(cell) for cell in row] for row in rows)


def _csv_text(cell: Cell) -> str:
    if cell is None:
        return ""
    if isinstance(cell, bool):
        return "true" if cell else "false"
    # Without exponents, which spreadsheets misread.
    return f"{cell:.9f}" if isinstance(cell, float) else str(cell)
