"""Results of ``shoal static`` as a table."""

import math

from rich import box
from rich.table import Table

from shoal.static.serving.report import StaticReport


def report_table(preset: str, report: StaticReport) -> Table:
    """One row for each figure; ``StaticReport`` defines them."""
    table = Table(
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        show_header=False,
        title=f"{preset}: {report.finished} of {report.requests} requests in {report.duration_s:.1f} s",
    )
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    tokens = report.tokens
    slices = ", ".join(f"{count} in {number}" for number, count in report.slices.items())
    rows = {
        "batches": f"{report.batches}",
        "mean batch size": _number(report.mean_batch_size, "", 1),
        "throughput": f"{_number(report.requests_per_s, ' requests/s', 2)}, "
        f"{_number(report.tokens_per_s, ' tokens/s', 1)}",
        "response time, mean / p95": f"{_number(report.response_mean_s, '', 2)} / "
        f"{_number(report.response_p95_s, ' s', 2)}",
        "output tokens": f"{tokens.useful_tokens:,}",
        "invalid tokens (after an end)": f"{tokens.invalid_tokens:,}",
        "pad tokens": f"{tokens.pad_tokens:,}",
        "prompt tokens prefilled": f"{tokens.prefilled_tokens:,}",
        "of these prefilled again": f"{tokens.recomputed_tokens:,}",
        "requests by batches they took": slices or "-",
        "batches that returned early": _number(100 * report.early_return_ratio, "%", 1),
        "workers completed, std": _number(report.worker_completion_std_s, " s", 2),
        "error of estimated time": _number(100 * report.estimate_error, "%", 0),
    }
    if report.failed:
        rows["failed"] = f"{report.failed}"
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def _number(value: float, unit: str, digits: int) -> str:
    return "-" if math.isnan(value) else f"{value:.{digits}f}{unit}"
