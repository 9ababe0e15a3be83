"""Published systems as points in the space of policies, by name."""

from collections.abc import Mapping
from dataclasses import dataclass

from shoal.schedule import (
    Aggressive,
    Conservative,
    DoublingBudget,
    Fcfs,
    FcfsStrict,
    Mlfq,
    PastFuture,
    RoundRobin,
    SchedulerOptions,
    Slice,
)


@dataclass(frozen=True, slots=True)
class Preset:
    """What a system chooses. layout: of the KV pool. says: what it is, in a line."""

    scheduler: SchedulerOptions
    says: str
    layout: str = "merged"


_VLLM = SchedulerOptions(order=Fcfs(), admission=Aggressive(), victim="newest")


def _seallm(variant: str) -> SchedulerOptions:
    return SchedulerOptions(
        order=DoublingBudget(variant=variant),
        admission=Aggressive(),
        victim="lowest-priority",
        preempt=True,
    )


PRESETS: Mapping[str, Preset] = {
    "shoal": Preset(SchedulerOptions(), "the default: the best combination that we found"),
    "vllm": Preset(_VLLM, "first come, first served; prompts first; whoever fits now is let in"),
    "orca": Preset(
        SchedulerOptions(order=Fcfs(), admission=Conservative(), victim="newest"),
        "first come, first served; memory for the longest possible output is set aside",
    ),
    "alpaserve": Preset(
        SchedulerOptions(order=FcfsStrict(), admission=Aggressive(), victim="newest"),
        "the service of the oldest request runs, the others wait",
    ),
    "muxserve": Preset(
        SchedulerOptions(order=RoundRobin(), admission=Aggressive(), victim="newest"),
        "services take turns, with quotas of decode steps; KV blocks of one layer and head",
        layout="split",
    ),
    "fastserve": Preset(
        SchedulerOptions(
            order=Mlfq(), admission=Aggressive(), victim="lowest-priority", eviction="swap", preempt=True
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
        SchedulerOptions(
            order=Fcfs(), admission=PastFuture(cold_start="max", draws="max", admit_every=10), victim="newest"
        ),
        "admission by forecast of the memory peak, as published",
    ),
    "lightllm-conservative": Preset(
        SchedulerOptions(
            order=Fcfs(), admission=Conservative(overcommit=1.5, admit_every=10), victim="newest"
        ),
        "memory for the longest possible outputs, overcommitted by half",
    ),
    "scls-cb": Preset(
        SchedulerOptions(
            order=Fcfs(), admission=Slice(tokens=128), victim="lowest-priority", eviction="swap"
        ),
        "slices of 128 tokens on continuous batching, memory for each reserved exactly",
    ),
}
"""Presets by name."""
