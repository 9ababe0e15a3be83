"""Residency policies: which weights are in the device's memory, if it does not hold all.

Each policy has a file of its own; ``protocol`` has the values that policies exchange with the scheduler.
"""

from collections.abc import Mapping

from shoal.core import lookup
from shoal.schedule.policies.residency.collate import CollateResidency
from shoal.schedule.policies.residency.fcfs import FcfsResidency
from shoal.schedule.policies.residency.protocol import (
    Place,
    ResidencyDecision,
    ResidencyPolicy,
    ResidencyView,
    Swap,
    WeightsView,
)
from shoal.schedule.policies.residency.token_deadlines import TokenDeadlines
from shoal.schedule.policies.residency.turns import TurnsResidency

RESIDENCY_POLICIES: Mapping[str, type[ResidencyPolicy]] = {
    "fcfs": FcfsResidency,
    "collate": CollateResidency,
    "turns": TurnsResidency,
    "token-deadlines": TokenDeadlines,
}


def residency_class(name: str) -> type[ResidencyPolicy]:
    """Raises ConfigError with the possible names if ``name`` is unknown."""
    return lookup("weights policy", RESIDENCY_POLICIES, name)


__all__ = [
    "RESIDENCY_POLICIES",
    "CollateResidency",
    "FcfsResidency",
    "Place",
    "ResidencyDecision",
    "ResidencyPolicy",
    "ResidencyView",
    "Swap",
    "TokenDeadlines",
    "TurnsResidency",
    "WeightsView",
    "residency_class",
]
