"""The iteration scheduler and its policies.

Here belong the scheduler (the mechanism: plans, block tables, queues), its orders (who steps next), its
admissions (whether one more fits) and its victims (who makes room). Policies are pure: they read what they
are given and return a choice. Tensors, clocks, processes and text belong elsewhere.

A new order, admission or victim is a class in ``orders``, ``admission`` or ``victims``, entered in the
registry at the end of that file.
"""

from shoal.schedule.admission import (
    ADMISSIONS,
    Admission,
    Aggressive,
    Conservative,
    Oracle,
    PastFuture,
    admission_class,
)
from shoal.schedule.describe import describe
from shoal.schedule.intake import ServiceLimits
from shoal.schedule.lookup import lookup
from shoal.schedule.options import SchedulerOptions
from shoal.schedule.orders import ORDERS, Decision, Order, Standing, Turn
from shoal.schedule.scheduler import Scheduler
from shoal.schedule.stats import SchedulerStats, ServiceStats
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
    "Oracle",
    "Order",
    "PastFuture",
    "Scheduler",
    "SchedulerOptions",
    "SchedulerStats",
    "ServiceLimits",
    "ServiceStats",
    "Shortage",
    "Standing",
    "Tracked",
    "Turn",
    "Victim",
    "admission_class",
    "describe",
    "lookup",
]
