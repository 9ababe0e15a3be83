"""Policies of `benchmarks.two_services`, by name: presets, and the default with one change."""

from collections.abc import Mapping
from dataclasses import replace

from shoal.config.presets import PRESETS
from shoal.core.units import LONGEST_S
from shoal.schedule import Aggressive, PastFuture, SchedulerOptions

DEDICATED = "dedicated"
MERGED_ROUND_ROBIN = "round-robin"
_DEFAULT = PRESETS["shoal"].scheduler
VARIANTS: Mapping[str, SchedulerOptions] = {
    "shoal-never": replace(_DEFAULT, preempt_for_waiting="never"),
    "shoal-less-urgent": replace(_DEFAULT, preempt_for_waiting="less-urgent"),
    "shoal-no-gap-bound": replace(_DEFAULT, max_token_gap_s=LONGEST_S),
    "shoal-watermark": replace(_DEFAULT, admission=Aggressive(watermark=0.8)),
    "shoal-past-future": replace(_DEFAULT, admission=PastFuture()),
}
"""Candidates for the default: preemption for waiting requests, bound of inter-token latency, admission."""
POLICIES = (*PRESETS, *VARIANTS, MERGED_ROUND_ROBIN, DEDICATED)


def policy_of(name: str) -> tuple[SchedulerOptions, str]:
    """Scheduler options and KV layout of a policy."""
    if name in VARIANTS:
        return VARIANTS[name], PRESETS["shoal"].layout
    if name == MERGED_ROUND_ROBIN:
        return PRESETS["muxserve"].scheduler, "merged"
    return PRESETS[name].scheduler, PRESETS[name].layout
