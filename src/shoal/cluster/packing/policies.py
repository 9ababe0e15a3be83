"""All packing policies by name."""

from collections.abc import Callable, Mapping

from shoal.cluster.packing.fit_packers import BestFit, WorstFit
from shoal.cluster.packing.lazy_mell import LazyMell
from shoal.cluster.packing.load_balance import LoadBalance
from shoal.cluster.packing.mell import PRINTED, ClassMell
from shoal.cluster.packing.packer import Packer
from shoal.cluster.packing.packing import Packing

PACKERS: Mapping[str, Callable[[Packing], Packer]] = {
    "best-fit": BestFit,
    "worst-fit": WorstFit,
    "load-balance": LoadBalance,
    "mell": LazyMell,
    "mell-eager": ClassMell,
    "mell-literal": lambda packing: ClassMell(packing, takes_tiny=PRINTED),
    "mell-forecast": lambda packing: LazyMell(packing, by_forecast=True),
}
"""Packers by name, with their defaults; ``mell-eager`` is the paper's, with its contradiction corrected."""
