"""Packing of running requests onto the fewest device groups (Mell, Liu et al., 2025).

Pure and deterministic, without a clock. A packer gets arrivals, growth and ends of requests, and returns
placements, migrations, preemptions, and groups that become active or idle. ``migration_budgets`` chooses how
each request migrates. The manager executes all that.
"""

from shoal.cluster.packing.changes import Arrival, Changes, Growth, Migration, Operations
from shoal.cluster.packing.classes import SizeClass, size_class
from shoal.cluster.packing.fit_packers import BestFit, WorstFit
from shoal.cluster.packing.fits import NEEDS, forecast_peak, present, reserve_mean
from shoal.cluster.packing.items import DeviceGroup, Item
from shoal.cluster.packing.lazy_mell import LazyMell
from shoal.cluster.packing.load_balance import LoadBalance
from shoal.cluster.packing.mell import MENDED, PRINTED, ClassMell
from shoal.cluster.packing.migration_budgets import (
    EpochSpending,
    MigrationBudgets,
    MigrationCandidate,
    choose_methods,
)
from shoal.cluster.packing.packer import Packer
from shoal.cluster.packing.packing import Occupancy, Packing
from shoal.cluster.packing.policies import PACKERS
from shoal.cluster.packing.priority import Priority
from shoal.cluster.packing.structure import Structure, bundle_of
from shoal.cluster.packing.tuning import PackerTuning, make_packer, tuned_by

__all__ = [
    "MENDED",
    "NEEDS",
    "PACKERS",
    "PRINTED",
    "Arrival",
    "BestFit",
    "Changes",
    "ClassMell",
    "DeviceGroup",
    "EpochSpending",
    "Growth",
    "Item",
    "LazyMell",
    "LoadBalance",
    "Migration",
    "MigrationBudgets",
    "Occupancy",
    "Operations",
    "Packer",
    "PackerTuning",
    "Packing",
    "Priority",
    "SizeClass",
    "Structure",
    "MigrationCandidate",
    "WorstFit",
    "bundle_of",
    "choose_methods",
    "forecast_peak",
    "make_packer",
    "present",
    "reserve_mean",
    "size_class",
    "tuned_by",
]
