"""Options of a cluster: how its engines are run, watched and chosen."""

import re
from dataclasses import dataclass, field
from typing import Literal

from shoal.cluster.packing.migration_budgets import MoveBudgets
from shoal.core import ConfigError
from shoal.engine.options import EngineOptions

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,31}")
BackendName = Literal["local", "ray"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartOptions:
    """How long an engine that died waits for its next start; a start that works out begins anew."""

    first_s: float = 1.0
    """After the first death."""
    factor: float = 2.0
    """How much longer after every further one."""
    max_s: float = 60.0
    """The longest."""

    def __post_init__(self) -> None:
        """Refuse waits that mean nothing; raises ConfigError."""
        if not 0 <= self.first_s <= self.max_s:
            raise ConfigError(
                f"cluster.restart: first must be between 0 and max, got {self.first_s} and {self.max_s} s"
            )
        if not self.factor >= 1:
            raise ConfigError(f"cluster.restart.factor must be at least 1, got {self.factor}")

    def wait_s(self, deaths: int) -> float:
        """The wait after so many deaths in succession, at least 1."""
        return min(self.max_s, self.first_s * self.factor ** min(deaths - 1, 1000))


@dataclass(frozen=True, slots=True, kw_only=True)
class PackingOptions:
    """How a packer that is the dispatch moves requests."""

    epoch_s: float = 1.0
    """It looks at how requests have grown so often."""
    budgets: MoveBudgets = field(default_factory=MoveBudgets)
    """What moves may take in an epoch."""

    def __post_init__(self) -> None:
        """Refuse epochs that have no length; raises ConfigError."""
        if not self.epoch_s > 0:
            raise ConfigError(f"packing.epoch must be more than 0, got {self.epoch_s:g} s")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterOptions:
    """How engines are run, watched and chosen."""

    name: str | None = None
    """Names the folder and the lock of the processes that own the engines, by which a server that is started
    again finds them; None: the server's port does."""
    backend: BackendName = "local"
    """Who runs the engines: child processes on this machine, or Ray."""
    address: str = "auto"
    """Address of the Ray cluster."""
    dispatch: str = "max-min"
    """Which engine a request goes to; in ``dispatch.DISPATCH_NAMES``."""
    packing: PackingOptions = field(default_factory=PackingOptions)
    """How often a packer that is the dispatch looks at requests, and what moves may take."""
    heartbeat_s: float = 1.0
    """Engines give a sign of life so often."""
    hung_after_s: float = 10.0
    """An engine silent for so long, without CPU time, is killed."""
    step_timeout_s: float = 30.0
    """An engine whose step stands still for so long is killed; see ``HangDetector``."""
    load_timeout_s: float = 120.0
    """An engine that does not get on with loading for so long is killed."""
    restart: RestartOptions = field(default_factory=RestartOptions)
    """How soon an engine that died is started again."""
    orphan_after_s: float = 60.0
    """Engines without a server end after this time."""
    wait_for_engine_s: float = 60.0
    """Requests of a service that no engine runs wait so long."""

    def __post_init__(self) -> None:
        """Refuse a name that no folder can have, and times that mean nothing; raises ConfigError."""
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
        for name in ("orphan_after_s", "wait_for_engine_s"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"cluster.{name.removesuffix('_s')} must not be negative")

    @property
    def tick_s(self) -> float:
        """Managers are told so often that time passes."""
        return self.heartbeat_s / 4


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePlan:
    """One engine of a cluster as it is wanted."""

    name: str
    """Its name in the cluster."""
    options: EngineOptions
    """What it is built from."""
