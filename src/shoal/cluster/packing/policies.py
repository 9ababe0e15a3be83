"""All packing policies by name."""

from collections.abc import Callable, Mapping
from functools import partial

from shoal.cluster.packing.fit_packers import BestFit, WorstFit
from shoal.cluster.packing.lazy_mell import LazyMell
from shoal.cluster.packing.load_balance import LoadBalance
from shoal.cluster.packing.mell import PRINTED, ClassMell
from shoal.cluster.packing.packer import Packer

PACKERS: Mapping[str, Callable[..., Packer]] = {
    "best-fit": BestFit,
    "worst-fit": WorstFit,
    "load-balance": LoadBalance,
    "mell": LazyMell,
    "mell-eager": ClassMell,
    "mell-literal": partial(ClassMell, takes_tiny=PRINTED),
    "mell-forecast": partial(LazyMell, by_forecast=True),
}
"""Packers by name; called with a ``Packing``, and with numbers of ``PackerTuning`` that replace defaults.

``mell-eager`` is the paper's, with its contradiction corrected."""
