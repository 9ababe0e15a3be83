"""Results of runs: records, summaries, tables, files, Chrome traces, plots and HTML reports.

The record of a run is plain values; its summary uses the formulas of ``core``. Nothing here runs, schedules
or simulates, and nothing reads a clock. matplotlib is an extra, imported only when a picture is drawn.
"""

from shoal.measure.chrome_trace import trace_events, write_trace
from shoal.measure.fidelity import Compared, Comparison, compare_with_measured
from shoal.measure.files import (
    FORMATS,
    REQUEST_COLUMNS,
    SAMPLE_COLUMNS,
    write_requests_csv,
    write_requests_jsonl,
    write_run,
    write_samples,
    write_summary,
)
from shoal.measure.html_report import report_html, write_report
from shoal.measure.inter_token_latencies import InterTokenLatencies
from shoal.measure.plots import Panel, Series, require_plots, save_plot
from shoal.measure.records import (
    EngineTotals,
    Event,
    RequestRow,
    RunRecord,
    Sample,
    ServiceSample,
    StepSpan,
    WeightsTotals,
)
from shoal.measure.summary import GroupSummary, Spread, Summary, summarise
from shoal.measure.tables import compare, summary_tables
from shoal.measure.verdict import Verdict, verdict

__all__ = [
    "FORMATS",
    "REQUEST_COLUMNS",
    "SAMPLE_COLUMNS",
    "Compared",
    "Comparison",
    "EngineTotals",
    "Event",
    "GroupSummary",
    "Panel",
    "RequestRow",
    "RunRecord",
    "Sample",
    "Series",
    "ServiceSample",
    "Spread",
    "StepSpan",
    "Summary",
    "Verdict",
    "InterTokenLatencies",
    "WeightsTotals",
    "compare",
    "compare_with_measured",
    "report_html",
    "require_plots",
    "save_plot",
    "summarise",
    "summary_tables",
    "trace_events",
    "verdict",
    "write_report",
    "write_requests_csv",
    "write_requests_jsonl",
    "write_run",
    "write_samples",
    "write_summary",
    "write_trace",
]
