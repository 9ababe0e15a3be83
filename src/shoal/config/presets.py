"""Scheduler presets: published systems (vLLM, Orca, SeaLLM, ...) as combinations of policies, by name."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shoal.cluster.batching_options import BatchingOptions
from shoal.config.batch_presets import BATCH_PRESETS, batch_scheduler
from shoal.core.units import LONGEST_S
from shoal.schedule import (
    Admission,
    Aggressive,
    Conservative,
    DoublingBudget,
    Fcfs,
    FcfsStrict,
    Mlfq,
    Order,
    PastFuture,
    RoundRobin,
    SchedulerOptions,
    Slice,
)


@dataclass(frozen=True, slots=True)
class Preset:
    """The options of a published system."""

    scheduler: SchedulerOptions
    summary: str
    """Description in one line."""
    layout: str = "merged"
    """Layout of the KV pool."""
    batching: BatchingOptions | None = None
    """How batches are formed; None: they are not."""
    dispatch: str | None = None
    """Dispatch policy; None: the default."""


def _system(order: Order, admission: Admission, **others: Any) -> SchedulerOptions:
    """Options with the defaults of published systems, where they differ from ours."""
    options = {
        "victim": "newest",
        "preemption_mode": "recompute",
        "preempt_for_waiting": "never",
        "max_token_gap_s": LONGEST_S,
        "max_running": 256,
        "co_batch": False,
        **others,
    }
    return SchedulerOptions(order=order, admission=admission, **options)


def _seallm(variant: str) -> SchedulerOptions:
    return _system(
        DoublingBudget(variant=variant),
        Aggressive(),
        victim="lowest-priority",
        preempt_for_waiting="less-urgent",
    )


PRESETS: Mapping[str, Preset] = {
    "shoal": Preset(SchedulerOptions(), "the default: the best combination that we found"),
    "vllm": Preset(
        _system(Fcfs(), Aggressive()), "first come, first served; requests that fit now are admitted"
    ),
    "orca": Preset(
        _system(Fcfs(), Conservative()),
        "first come, first served; memory for the longest possible output is set aside",
    ),
    "alpaserve": Preset(
        _system(FcfsStrict(), Aggressive()),
        "the service of the oldest request runs, the others wait",
    ),
    "muxserve": Preset(
        _system(RoundRobin(), Aggressive()),
        "services take turns, with quotas of decode steps; KV blocks of one layer and head",
        layout="split",
    ),
    "fastserve": Preset(
        _system(
            Mlfq(),
            Aggressive(),
            victim="lowest-priority",
            preemption_mode="swap",
            preempt_for_waiting="less-urgent",
        ),
        "skip-join multi-level feedback queue; KV of preempted requests is swapped to the host",
    ),
    "seallm": Preset(_seallm("literal"), "doubling budget as published: one service and one phase a step"),
    "seallm-join": Preset(
        _seallm("join"), "doubling budget; the chosen service's waiting requests join its batch"
    ),
    "seallm-batch": Preset(
        _seallm("batch"), "doubling budget by priority divided by the batch that a step can serve"
    ),
    "past-future": Preset(
        _system(Fcfs(), PastFuture(cold_start="max", draws="max", admit_every=10)),
        "admission by forecast of the memory peak, as published",
    ),
    "lightllm-conservative": Preset(
        _system(Fcfs(), Conservative(overcommit=1.5, admit_every=10)),
        "memory for the longest possible outputs, overcommitted by half",
    ),
    "scls-cb": Preset(
        _system(Fcfs(), Slice(tokens=128), victim="lowest-priority", preemption_mode="swap"),
        "slices of 128 tokens on continuous batching, memory for each reserved exactly",
    ),
    **{
        name: Preset(batch_scheduler(), each.summary, batching=each.batching, dispatch=each.dispatch)
        for name, each in BATCH_PRESETS.items()
    },
}
