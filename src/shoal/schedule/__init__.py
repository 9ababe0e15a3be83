"""The iteration scheduler and its policies.

Here belong the scheduler (the mechanism: plans, block tables, queues), its orders (who steps next), its
admissions (whether one more fits) and its victims (who makes room). Policies are pure: they read what they
are given and return a choice. Tensors, clocks, processes and text belong elsewhere.

A new admission or victim is a class in ``admission`` or ``victims``, entered in the registry at the end of
that file; a new order is a file in ``orders``, entered in that package's registry.
"""

from shoal.schedule.admission import (
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
from shoal.schedule.describe import describe
from shoal.schedule.group import GroupView, ServiceTraits
from shoal.schedule.intake import ServiceLimits
from shoal.schedule.options import SchedulerOptions
from shoal.schedule.orders import (
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
    Standing,
    Turn,
    WeightedTurns,
)
from shoal.schedule.scheduler import Scheduler
from shoal.schedule.stats import Observed, SchedulerStats, ServiceStats
from shoal.schedule.tracked import Tracked
from shoal.schedule.victims import VICTIMS, Shortage, Victim

__all__ = [
    "ADMISSIONS",
    "ORDERS",
    "VICTIMS",
    "Admission",
    "Aggressive",
    "Conservative",
    "Decision",
    "DoublingBudget",
    "EarliestDeadline",
    "Fcfs",
    "FcfsStrict",
    "GroupView",
    "Mlfq",
    "Observed",
    "Oracle",
    "Order",
    "PastFuture",
    "Predicted",
    "RoundRobin",
    "Scheduler",
    "SchedulerOptions",
    "SchedulerStats",
    "ServiceLimits",
    "ServiceStats",
    "ServiceTraits",
    "ShortestRemaining",
    "Shortage",
    "Slice",
    "Standing",
    "Tracked",
    "Turn",
    "Victim",
    "WeightedTurns",
    "admission_class",
    "describe",
]
