"""The iteration scheduler and its policies.

Here belong the scheduler (the mechanism: plans, block tables, queues), its orders (who steps next), its
admissions (whether one more fits) and its victims (who is preempted). Policies are pure: they read what they
are given and return a choice. Tensors, clocks, processes and text belong elsewhere.

A new order or admission is a class in the package ``orders`` or ``admissions``, entered in that package's
registry; a new victim policy is a class in ``victims``, entered in the registry at its end.
"""

from shoal.schedule.log import describe
from shoal.schedule.migration import HeldRequest, KVTable
from shoal.schedule.options import PREEMPT_FOR_WAITING, SchedulerOptions
from shoal.schedule.policies.admissions import (
    ADMISSIONS,
    Admission,
    Aggressive,
    Conservative,
    Oracle,
    PastFuture,
    Predicted,
    Slice,
    admission_class,
)
from shoal.schedule.policies.orders import (
    ORDERS,
    Decision,
    DoublingBudget,
    EarliestDeadline,
    Fcfs,
    FcfsStrict,
    Mlfq,
    Order,
    RoundRobin,
    ShortestRemaining,
    Turn,
    WeightedTurns,
)
from shoal.schedule.policies.victims import VICTIMS, MemoryPressure, Victim
from shoal.schedule.policies.view import SchedulerView, ServiceTraits, ServiceView
from shoal.schedule.request_state import RequestState
from shoal.schedule.scheduler import Scheduler
from shoal.schedule.stats import Observed, SchedulerStats, ServiceStats
from shoal.schedule.submission import resumable_request
from shoal.schedule.validation import ServiceLimits

__all__ = [
    "ADMISSIONS",
    "ORDERS",
    "PREEMPT_FOR_WAITING",
    "VICTIMS",
    "Admission",
    "Aggressive",
    "Conservative",
    "Decision",
    "DoublingBudget",
    "EarliestDeadline",
    "Fcfs",
    "FcfsStrict",
    "HeldRequest",
    "KVTable",
    "MemoryPressure",
    "Mlfq",
    "Observed",
    "Oracle",
    "Order",
    "PastFuture",
    "Predicted",
    "RequestState",
    "RoundRobin",
    "Scheduler",
    "SchedulerOptions",
    "SchedulerStats",
    "SchedulerView",
    "ServiceLimits",
    "ServiceStats",
    "ServiceTraits",
    "ServiceView",
    "ShortestRemaining",
    "Slice",
    "Turn",
    "Victim",
    "WeightedTurns",
    "admission_class",
    "describe",
    "resumable_request",
]
