"""Numbers of packers that a configuration may set, and packers made with them."""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from shoal.cluster.packing.packer import Packer
from shoal.cluster.packing.packing import Packing
from shoal.cluster.packing.policies import PACKERS
from shoal.cluster.packing.priority import Priority
from shoal.core import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class PackerTuning:
    """None: the packer's own default."""

    headroom: float | None = None
    """Share of an engine's memory that placements leave free, for growth."""
    relief: float | None = None
    """Share that is made free when an engine has too little."""
    spare: float | None = None
    """Share that stays free in the engines that take the requests of a drained one."""
    threshold: float | None = None
    """Difference of loads, as shares of the memory, that is left alone."""
    priority: Priority | None = None
    """Weights of what makes one suitable engine better than another."""

    def __post_init__(self) -> None:
        """Raises ConfigError for shares out of range."""
        for name in ("headroom", "relief", "spare", "threshold"):
            share = getattr(self, name)
            if share is not None and not 0 <= share < 1:
                raise ConfigError(f"packing.{name} must be in [0, 1), got {share:g}")

    def given(self) -> Mapping[str, Any]:
        """What is not left to the packer."""
        own = {each.name: getattr(self, each.name) for each in fields(PackerTuning)}
        return {name: value for name, value in own.items() if value is not None}


def make_packer(name: str, tuning: PackerTuning) -> Packer:
    """A packer without engines; raises ConfigError for numbers that it does not have."""
    factory, given = PACKERS[name], tuning.given()
    known = tuned_by(name)
    for option in given:
        if option not in known:
            has = f"it has {', '.join(known)}" if known else "it has none of these numbers"
            raise ConfigError(f"packing.{option} is not a number of {name}: {has}")
    return factory(Packing([]), **given)


def tuned_by(name: str) -> tuple[str, ...]:
    """The numbers that a packer has."""
    parameters = inspect.signature(PACKERS[name]).parameters
    return tuple(each.name for each in fields(PackerTuning) if each.name in parameters)
