"""Orders: which service steps next, and the priority of its requests (FCFS, round robin, MLFQ, EDF, ...).

Each order has a file of its own; ``protocol`` has the values that orders exchange with the scheduler. An
order has options and no state: all that it needs is in the view that it gets. Memory, preemption and
starvation are handled elsewhere in this room.

A new order is a class in a file of its own, added to ``ORDERS`` below. Its base is ``ByPriority`` if it gives
every request a priority.
"""

from collections.abc import Mapping

from shoal.core import lookup
from shoal.schedule.policies.orders.by_priority import ByPriority
from shoal.schedule.policies.orders.client_priority import ClientPriority
from shoal.schedule.policies.orders.doubling_budget import DoublingBudget
from shoal.schedule.policies.orders.edf import EarliestDeadline
from shoal.schedule.policies.orders.fair import Fair
from shoal.schedule.policies.orders.fcfs import MAX_DELAY_STEPS, Fcfs, FcfsStrict
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
    "fair": Fair,
    "weighted-turns": WeightedTurns,
}


def order_class(name: str) -> type[Order]:
    """Raises ConfigError with the possible names if ``name`` is unknown."""
    return lookup("scheduler order", ORDERS, name)


__all__ = [
    "ORDERS",
    "MAX_DELAY_STEPS",
    "ByPriority",
    "ClientPriority",
    "Decision",
    "DoublingBudget",
    "EarliestDeadline",
    "Fair",
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
