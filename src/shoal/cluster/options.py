"""Options of a cluster: backend, dispatch policy, packing, heartbeats, timeouts, restarts."""

import re
from dataclasses import dataclass, field
from typing import Literal

from shoal.cluster.batching_options import BatchingOptions
from shoal.cluster.fleet_options import FleetOptions
from shoal.cluster.packing import PACKERS, PackerTuning, make_packer
from shoal.cluster.packing.migration_budgets import MigrationBudgets
from shoal.cluster.placing.options import PlacementOptions
from shoal.core import ConfigError
from shoal.engine.options import EngineOptions

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,31}")
_SHORTEST_TICK_S = 0.005
BackendName = Literal["local", "ray"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartOptions:
    """Delays before restarts of a dead engine; after ``max_s`` in state READY they start again with
    ``first_s``."""

    first_s: float = 1.0
    factor: float = 2.0
    """Growth of the delay with each further death."""
    max_s: float = 60.0

    def __post_init__(self) -> None:
        """Raises ConfigError for invalid delays."""
        if not 0 <= self.first_s <= self.max_s:
            raise ConfigError(
                f"cluster.restart: first must be between 0 and max, got {self.first_s} and {self.max_s} s"
            )
        if not self.factor >= 1:
            raise ConfigError(f"cluster.restart.factor must be at least 1, got {self.factor}")

    def wait_s(self, deaths: int) -> float:
        """The delay after this many deaths in succession, at least 1."""
        return min(self.max_s, self.first_s * self.factor ** min(deaths - 1, 1000))


@dataclass(frozen=True, slots=True, kw_only=True)
class PackingOptions:
    """How a packer, as the dispatch policy, migrates requests."""

    epoch_s: float = 1.0
    """Interval at which it looks at how requests have grown."""
    budgets: MigrationBudgets = field(default_factory=MigrationBudgets)
    """Limits on migrations in an epoch."""
    tuning: PackerTuning = field(default_factory=PackerTuning)

    def __post_init__(self) -> None:
        """Raises ConfigError for epochs without length."""
        if not self.epoch_s > 0:
            raise ConfigError(f"packing.epoch must be more than 0, got {self.epoch_s:g} s")


def check_packing(packing: PackingOptions, dispatch: str) -> None:
    """Raise ConfigError for numbers that the packer which is the dispatch does not have."""
    if dispatch in PACKERS:
        make_packer(dispatch, packing.tuning)


def check_batching(batching: BatchingOptions | None, dispatch: str) -> None:
    """Raise ConfigError for a dispatch policy that cannot choose an engine for a whole batch."""
    if batching is not None and dispatch in PACKERS:
        raise ConfigError(
            "batching needs a dispatch policy that chooses an engine for a whole batch; "
            f"{dispatch} packs single requests"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterOptions:
    name: str | None = None
    """Name of the node, by which a restarted server finds its engines; None: derived from the server's port.
    """
    backend: BackendName = "local"
    """Child processes on this machine, or actors of a Ray cluster."""
    address: str = "auto"
    """Address of the Ray cluster."""
    dispatch: str = "max-min"
    """Policy that chooses the engine of a request; one of ``dispatch.DISPATCH_NAMES``."""
    packing: PackingOptions = field(default_factory=PackingOptions)
    """If the dispatch policy is a packer."""
    placement: PlacementOptions = field(default_factory=PlacementOptions)
    """Whether the services' engines change with the traffic."""
    batching: BatchingOptions | None = None
    """How batches of waiting requests are formed; None: each request is dispatched by itself."""
    fleet: FleetOptions | None = None
    """How many engines run; None: all, unless an operator changes that."""
    heartbeat_s: float = 1.0
    """Interval of heartbeats."""
    hung_after_s: float = 10.0
    """An engine that is silent for this time, without using CPU time, is killed."""
    step_timeout_s: float = 30.0
    """An engine whose step makes no progress for this time is killed; see ``StepJudge``."""
    load_timeout_s: float = 120.0
    """An engine that loads without progress for this time is killed."""
    restart: RestartOptions = field(default_factory=RestartOptions)
    orphan_after_s: float = 60.0
    """Engines without a server end after this time."""
    wait_for_engine_s: float = 60.0
    """Requests are refused after waiting this long without a ready engine of their service."""

    def __post_init__(self) -> None:
        """Raises ConfigError for a name that no folder can have, and for invalid times."""
        if self.name is not None and not _NAME.fullmatch(self.name):
            raise ConfigError(
                "cluster.name has up to 32 letters, digits, '.', '_' or '-' and begins with a letter or "
                f"digit, got {self.name!r}"
            )
        if not self.heartbeat_s > 0:
            raise ConfigError("cluster.heartbeat must be more than 0")
        for name in ("hung_after_s", "step_timeout_s", "load_timeout_s"):
            if not getattr(self, name) >= 3 * self.heartbeat_s:
                raise ConfigError(
                    f"cluster.{name.removesuffix('_s')} must be at least three heartbeats "
                    f"({3 * self.heartbeat_s:g} s), got {getattr(self, name):g} s"
                )
        check_batching(self.batching, self.dispatch)
        check_packing(self.packing, self.dispatch)
        for name in ("orphan_after_s", "wait_for_engine_s"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"cluster.{name.removesuffix('_s')} must not be negative")

    @property
    def tick_s(self) -> float:
        """Interval of the manager's ticks, at which batches are formed as well."""
        tick_s = self.heartbeat_s / 4
        if self.batching is None or self.batching.interval_s is None:
            return tick_s
        return min(tick_s, max(self.batching.interval_s / 8, _SHORTEST_TICK_S))


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePlan:
    """Name and options of one engine."""

    name: str
    options: EngineOptions
