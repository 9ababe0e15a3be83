"""Decisions of static batching: when batches are formed, of which requests, and for which worker.

Batch formers group requests, offloaders choose workers, an interval says when; the global batcher applies
them, and presets are the published combinations. All is pure: no clock, no model. Batches are run by
``static.serving``.

A new batch former is a class with ``form``, entered in ``FORMERS``.
"""

from shoal.static.batching.account import BatchAccount, account
from shoal.static.batching.batcher import GlobalBatcher
from shoal.static.batching.estimates import MemoryByBytes, MemoryByRule, MemoryLimit, ServingTime
from shoal.static.batching.fixed import Fixed
from shoal.static.batching.formers import FORMERS, batch_former
from shoal.static.batching.forming import BatchFormer, FormingContext
from shoal.static.batching.interval import AdaptiveInterval, FixedInterval, Interval, WhenIdle
from shoal.static.batching.least_time import LeastTime
from shoal.static.batching.offload import OFFLOADERS, MaxMin, Offloader, RoundRobin
from shoal.static.batching.options import StaticOptions
from shoal.static.batching.presets import STATIC_ENGINES, STATIC_PRESETS, EngineNumbers, static_preset
from shoal.static.batching.s3 import FirstFitDecreasing
from shoal.static.batching.slo_odbs import Aim, SloOdbs
from shoal.static.batching.types import Assignment, StaticBatch, StaticRequest

__all__ = [
    "FORMERS",
    "OFFLOADERS",
    "STATIC_ENGINES",
    "STATIC_PRESETS",
    "AdaptiveInterval",
    "Aim",
    "Assignment",
    "BatchAccount",
    "BatchFormer",
    "EngineNumbers",
    "FirstFitDecreasing",
    "Fixed",
    "FixedInterval",
    "FormingContext",
    "GlobalBatcher",
    "Interval",
    "LeastTime",
    "MaxMin",
    "MemoryByBytes",
    "MemoryByRule",
    "MemoryLimit",
    "Offloader",
    "RoundRobin",
    "ServingTime",
    "SloOdbs",
    "StaticBatch",
    "StaticOptions",
    "StaticRequest",
    "WhenIdle",
    "account",
    "batch_former",
    "static_preset",
]
