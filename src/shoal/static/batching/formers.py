"""The table of batch formers by name."""

from shoal.core import lookup
from shoal.static.batching.fixed import Fixed
from shoal.static.batching.forming import BatchFormer
from shoal.static.batching.least_time import LeastTime
from shoal.static.batching.s3 import FirstFitDecreasing
from shoal.static.batching.slo_odbs import Aim, SloOdbs

FORMERS: dict[str, BatchFormer] = {
    "fixed": Fixed(),
    "scls": LeastTime(),
    "odbs": SloOdbs(aim=Aim.LENGTH),
    "slo-dbs": SloOdbs(aim=Aim.SLO),
    "slo-odbs": SloOdbs(),
    "slo-odbs-literal": SloOdbs(literal=True),
    "s3": FirstFitDecreasing(),
}
"""Batch formers with the papers' parameters; a new one is a class with ``form``, entered here."""


def batch_former(name: str) -> BatchFormer:
    """The batch former of this name; raises ConfigError with the known names."""
    return lookup("batch former", FORMERS, name)
