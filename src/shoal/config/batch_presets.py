"""Presets of systems that serve batches: SCLS and the steps to it, S3, and UELLM with its ablations."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from shoal.cluster.batching_options import BatchingOptions
from shoal.core.units import LONGEST_S
from shoal.schedule import Batch, Fcfs, SchedulerOptions

INTERVAL_S = 3.0
"""SCLS's Gamma for its faster engine (section 5.1)."""
SLICE_TOKENS = 128
FIXED_BATCH = 16


@dataclass(frozen=True, slots=True)
class BatchPreset:
    """How batches are formed and dispatched."""

    batching: BatchingOptions
    summary: str
    dispatch: str = "round-robin"


def batch_scheduler() -> SchedulerOptions:
    """The scheduler of all of them: one batch after another, nothing that breaks a batch up."""
    return SchedulerOptions(
        order=Fcfs(),
        admission=Batch(),
        victim="newest",
        preemption_mode="recompute",
        preempt_for_waiting="never",
        starvation_s=LONGEST_S,
        max_token_gap_s=LONGEST_S,
        max_running=256,
        co_batch=False,
    )


_SO = BatchingOptions(slice_tokens=SLICE_TOKENS, max_batch=FIXED_BATCH)
_PM = replace(_SO, former="scls", interval_s=INTERVAL_S)
_AB = replace(_PM, max_batch=None)
_LB = replace(_AB, longest_first=True)


def _predicted(former: str, max_batch: int | None = FIXED_BATCH) -> BatchingOptions:
    return BatchingOptions(former=former, max_batch=max_batch, trust_predictions=True, lengths="learned")


BATCH_PRESETS: Mapping[str, BatchPreset] = {
    "sls": BatchPreset(
        replace(_SO, slice_tokens=None), "batches of 16, first come, first served, until all have ended"
    ),
    "so": BatchPreset(_SO, "sls in slices of 128 tokens"),
    "pm": BatchPreset(_PM, "so with batches of similar inputs, formed every 3 s"),
    "ab": BatchPreset(_AB, "pm with batches as large as memory allows"),
    "lb": BatchPreset(_LB, "ab with the longest batch for the least loaded engine", dispatch="max-min"),
    "scls": BatchPreset(
        replace(_LB, load_factor=0.5), "lb at an interval that grows with the load", dispatch="max-min"
    ),
    "s3": BatchPreset(_predicted("s3", None), "batches packed by predicted memory, largest first"),
    "odbs": BatchPreset(_predicted("odbs"), "batches of similar predicted outputs"),
    "slo-dbs": BatchPreset(_predicted("slo-dbs"), "batches of similar latency goals, most urgent first"),
    "uellm": BatchPreset(
        _predicted("slo-odbs"), "batches of similar goals and predicted outputs (UELLM's SLO-ODBS)"
    ),
    "uellm-literal": BatchPreset(_predicted("slo-odbs-literal"), "uellm with its algorithm as printed"),
}
"""SCLS's ablations from ``sls`` to ``scls``, then S3, and UELLM with its ablations."""
