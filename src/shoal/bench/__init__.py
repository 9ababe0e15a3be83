"""Load for OpenAI-compatible servers: sends the requests of a workload, times their streams, and reports.

This package has the HTTP client (``target``), open and closed loop (``load``), texts of a given length
(``texts``), the records of a run (``results``), and the search for the highest rate that a server sustains
(``sweep``). Workloads come from ``shoal.workload``, summaries, verdicts and reports from ``shoal.measure``.
It knows nothing of engines, and measures other servers as well.
"""

from shoal.bench.load import ClientState, LoadRun, run_load
from shoal.bench.results import run_record, vllm_figures
from shoal.bench.sweep import Sweep, find_knee
from shoal.bench.target import Answer, Call, Target
from shoal.bench.texts import make_calls

__all__ = [
    "Answer",
    "Call",
    "ClientState",
    "LoadRun",
    "Sweep",
    "Target",
    "find_knee",
    "make_calls",
    "run_load",
    "run_record",
    "vllm_figures",
]
