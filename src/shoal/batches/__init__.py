"""Batch formers: which waiting requests are served together as one batch (SCLS, UELLM, S3).

A former divides requests into batches that fit in memory, by estimates of serving time and memory. It is
pure. The cluster's manager forms batches with it (``cluster.batching``); ``experiments.padded`` has engines
that pad them.

A new batch former is a class with ``form`` in a file of its own, entered in ``FORMERS``.
"""

from collections.abc import Mapping

from shoal.batches.estimates import MemoryByBytes, MemoryByRule, MemoryLimit, ServingTime
from shoal.batches.fixed import Fixed
from shoal.batches.forming import BatchFormer, FormingContext
from shoal.batches.least_time import LeastTime
from shoal.batches.requests import PooledRequest, RequestBatch
from shoal.batches.s3 import FirstFitDecreasing
from shoal.batches.slo_odbs import Aim, Reading, SloOdbs
from shoal.core import lookup

FORMERS: Mapping[str, BatchFormer] = {
    "fixed": Fixed(),
    "scls": LeastTime(),
    "odbs": SloOdbs(aim=Aim.LENGTH),
    "slo-dbs": SloOdbs(aim=Aim.SLO),
    "slo-odbs": SloOdbs(),
    "slo-odbs-literal": SloOdbs(reading=Reading.ALGORITHM),
    "slo-odbs-equations": SloOdbs(reading=Reading.EQUATIONS),
    "s3": FirstFitDecreasing(),
}
"""Batch formers by name, with the papers' parameters."""


def batch_former(name: str) -> BatchFormer:
    """The batch former of this name; raises ConfigError with the known names."""
    return lookup("batch former", FORMERS, name)


__all__ = [
    "FORMERS",
    "Aim",
    "BatchFormer",
    "FirstFitDecreasing",
    "Fixed",
    "FormingContext",
    "LeastTime",
    "MemoryByBytes",
    "MemoryByRule",
    "MemoryLimit",
    "PooledRequest",
    "Reading",
    "RequestBatch",
    "ServingTime",
    "SloOdbs",
    "batch_former",
]
