"""Orders: which service steps next, and in which order its requests take part.

Here belong the classes that choose, one idea to a file, and the values they exchange with the scheduler
(``protocol``). An order holds knobs and no state: whatever it needs to know is in what it is shown. Whether
there is memory, who loses it, and that nobody starves is decided elsewhere in this room.

A new order is a class in a file of its own, entered in ``ORDERS`` below. One that gives every request a
priority has ``ByPriority`` as its base.
"""

from collections.abc import Mapping

from shoal.core import lookup
from shoal.schedule.policies.orders.by_priority import ByPriority
from shoal.schedule.policies.orders.client_priority import ClientPriority
from shoal.schedule.policies.orders.doubling_budget import DoublingBudget
from shoal.schedule.policies.orders.edf import EarliestDeadline
from shoal.schedule.policies.orders.fcfs import PATIENCE_STEPS, Fcfs, FcfsStrict
from shoal.schedule.policies.orders.mlfq import Mlfq
from shoal.schedule.policies.orders.protocol import Decision, Order, Turn
from shoal.schedule.policies.orders.round_robin import RoundRobin
from shoal.schedule.policies.orders.shortest_remaining import ShortestRemaining
from shoal.schedule.policies.orders.weighted_turns import WeightedTurns

ORDERS: Mapping[str, type[Order]] = {
    "fcfs": Fcfs,
    "fcfs-strict": FcfsStrict,
    "round-robin": RoundRobin,
    "mlfq": Mlfq,
    "doubling-budget": DoublingBudget,
    "shortest-remaining": ShortestRemaining,
    "edf": EarliestDeadline,
    "priority": ClientPriority,
    "weighted-turns": WeightedTurns,
}
"""Orders by name."""


def order_class(name: str) -> type[Order]:
    """The order called ``name``; raises ConfigError with the possible names."""
    return lookup("scheduler order", ORDERS, name)


__all__ = [
    "ORDERS",
    "PATIENCE_STEPS",
    "ByPriority",
    "ClientPriority",
    "Decision",
    "DoublingBudget",
    "EarliestDeadline",
    "Fcfs",
    "FcfsStrict",
    "Mlfq",
    "Order",
    "RoundRobin",
    "ShortestRemaining",
    "Turn",
    "WeightedTurns",
    "order_class",
]
