"""Iteration-level scheduler (continuous batching): queues, admission, preemption, step plans, results.

``policies/`` has the pure policies: orders (which service steps next, and the priority of its requests),
admissions (whether one more request fits in memory), victims (which request is preempted) and residency
(which weights are on the device). The loop around them: ``scheduler`` is the interface, ``plan_chooser``
picks the next plan, ``batching`` forms the batch of running requests, ``admitter`` admits waiting ones,
``preemption`` makes room, ``plan_builder`` writes the plan, ``step_tracker`` keeps it while it is in flight,
``output`` processes its result. ``decode_runs`` plans many decode steps at once. ``request_store`` keeps the
requests, ``service_registry`` the services, ``weights`` where their weights are; ``residency`` fetches and
evicts these, where the device does not hold all.
Tensors, clocks, processes and text belong to other rooms.

A new order or admission is a class in ``policies/orders`` or ``policies/admissions``, added to the registry
in that package; a new victim policy is a class in ``policies/victims``, added to the registry at its end.
"""

from shoal.schedule.log import describe
from shoal.schedule.migration import HeldRequest, KVTable
from shoal.schedule.options import PREEMPT_FOR_WAITING, SchedulerOptions
from shoal.schedule.policies.admissions import (
    ADMISSIONS,
    Admission,
    Aggressive,
    Batch,
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
from shoal.schedule.service_limits import ServiceLimits
from shoal.schedule.stats import Observed, SchedulerStats, ServiceStats
from shoal.schedule.submission import resumable_request
from shoal.schedule.weights_options import WeightsOptions

__all__ = [
    "ADMISSIONS",
    "ORDERS",
    "PREEMPT_FOR_WAITING",
    "VICTIMS",
    "WeightsOptions",
    "Admission",
    "Aggressive",
    "Batch",
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
