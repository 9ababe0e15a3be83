"""Reads the size of the fleet."""

from typing import Any

from shoal.cluster.fleet_options import FleetOptions
from shoal.config.sections import section_of
from shoal.config.value_kinds import Kind, Maybe, integer, number


def fleet_section() -> Kind:
    """The keys of the fleet; without any, all engines run."""
    rules: dict[tuple[type, str], Any] = {
        (FleetOptions, "min"): integer(1),
        (FleetOptions, "max"): Maybe(integer(1)),
        (FleetOptions, "kv_share"): number(above=0, maximum=1),
        (FleetOptions, "requests"): Maybe(integer(1)),
        (FleetOptions, "attainment"): Maybe(number(above=0, maximum=1)),
    }
    return Maybe(section_of(FleetOptions, rules))
