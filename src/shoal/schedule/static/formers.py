"""Every batch former by name."""

from shoal.schedule.lookup import lookup
from shoal.schedule.static.fixed import Fixed
from shoal.schedule.static.forming import BatchFormer
from shoal.schedule.static.least_time import LeastTime
from shoal.schedule.static.s3 import FirstFitDecreasing
from shoal.schedule.static.slo_odbs import Aim, SloOdbs

FORMERS: dict[str, BatchFormer] = {
    "fixed": Fixed(),
    "scls": LeastTime(),
    "odbs": SloOdbs(aim=Aim.LENGTH),
    "slo-dbs": SloOdbs(aim=Aim.SLO),
    "slo-odbs": SloOdbs(),
    "slo-odbs-literal": SloOdbs(literal=True),
    "s3": FirstFitDecreasing(),
}
"""Batch formers with the papers' knobs; a new one is a class with ``form``, entered here."""


def batch_former(name: str) -> BatchFormer:
    """The batch former of this name; raises ConfigError with the possible ones."""
    return lookup("batch former", FORMERS, name)
