"""Static batches: requests gather in a pool, are formed into padded batches, and go to workers.

Here belong batch formers (who shares a batch), offloaders (whose it is), the interval between formings, the
global batcher that applies them, and the published combinations. All is pure: no clock, no model. Serving a
batch belongs to the executor, driving workers to the engine.

A new batch former is a class with ``form``, entered in ``FORMERS``.
"""

from shoal.schedule.static.account import BatchAccount, account
from shoal.schedule.static.batcher import GlobalBatcher
from shoal.schedule.static.estimates import MemoryByBytes, MemoryByRule, MemoryLimit, ServingTime
from shoal.schedule.static.fixed import Fixed
from shoal.schedule.static.formers import FORMERS, batch_former
from shoal.schedule.static.forming import BatchFormer, Forming
from shoal.schedule.static.interval import AdaptiveInterval, FixedInterval, Interval, WhenIdle
from shoal.schedule.static.least_time import LeastTime
from shoal.schedule.static.offload import OFFLOADERS, MaxMin, Offloader, RoundRobin
from shoal.schedule.static.options import StaticOptions
from shoal.schedule.static.presets import STATIC_ENGINES, STATIC_PRESETS, EngineNumbers, static_preset
from shoal.schedule.static.s3 import FirstFitDecreasing
from shoal.schedule.static.slo_odbs import Aim, SloOdbs
from shoal.schedule.static.types import Assignment, StaticBatch, StaticRequest

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
    "Forming",
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
