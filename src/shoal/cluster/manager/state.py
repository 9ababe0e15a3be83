"""State that the manager keeps: engines, their transitions, and unfinished requests."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto

from shoal.batches import PooledRequest
from shoal.cluster.manager.actions import MigrationOutcome
from shoal.cluster.manager.engine_load import BatchShape, EngineLoad
from shoal.cluster.manager.events import (
    EngineEnded,
    EngineHeartbeat,
    EngineLoading,
    EngineProcessUsage,
    EngineReady,
    MigrationMethod,
    ServiceFailed,
    ServiceLoaded,
    ServiceUnloaded,
    Submitted,
    WeightsMoved,
)
from shoal.cluster.status import EngineState, EngineStatus
from shoal.engine.process.stall_tracker import StallTracker

TRANSITIONS: Mapping[EngineState, frozenset[EngineState]] = {
    EngineState.WAITING: frozenset({EngineState.LOADING, EngineState.DRAINING, EngineState.STANDBY}),
    EngineState.LOADING: frozenset({EngineState.READY, EngineState.WAITING, EngineState.DRAINING}),
    EngineState.READY: frozenset({EngineState.WAITING, EngineState.DRAINING}),
    EngineState.DRAINING: frozenset(
        {EngineState.WAITING, EngineState.LOADING, EngineState.READY, EngineState.STANDBY}
    ),
    EngineState.STANDBY: frozenset({EngineState.LOADING, EngineState.DRAINING}),
}
"""Allowed state transitions of an engine; it may be removed in any state."""


class Residence(Enum):
    """Whether a service that is placed on an engine is in its memory."""

    ABSENT = auto()
    LOADING = auto()
    LOADED = auto()
    UNLOADING = auto()
    FAILED = auto()


@dataclass(slots=True, eq=False)
class ManagedCall:
    """One unfinished call, without its text: where it runs or waits, and what happened to its engines."""

    submitted: Submitted
    number: int
    """Order of submission."""
    tokens: int
    """Expected output tokens of each choice."""
    attempt: int = 0
    engine: "Engine | None" = None
    """None: it waits."""
    waiting_since_ns: int = 0
    """Start of its present wait."""
    deaths: int = 0
    """Engines that died in its steps, without progress in between."""
    deaths_alone: int = 0
    """Those of them that ran nothing else."""
    quarantined_ns: int | None = None
    """Since when it may only run alone; None: it may run with other requests."""
    migration: str | None = None
    """Id of its migration; None: it is not migrating."""
    kv_transferable: bool = True
    """Whether it may migrate with its KV; False once that has failed."""
    no_migration_until_ns: int = 0
    """No migration before this time, because one has failed."""
    pooled: PooledRequest | None = None
    """What batch formers see of it; None without batching."""
    batch: int | None = None
    """Number of its last batch."""
    shape: BatchShape | None = None
    """Size of its last batch."""
    unloadable_on: set[str] = field(default_factory=set)
    """Engines that could not load its weights."""

    @property
    def id(self) -> str:
        return self.submitted.request

    @property
    def service(self) -> str:
        return self.submitted.service

    @property
    def number_and_service(self) -> tuple[int, str]:
        return self.number, self.service

    @property
    def suspected(self) -> bool:
        """Whether it may have crashed an engine."""
        return self.deaths > 0 or self.quarantined_ns is not None


@dataclass(slots=True, eq=False)
class Engine:
    """One engine of the cluster."""

    load: EngineLoad
    state: EngineState
    incarnation: int
    """How often it was started."""
    runs: bool
    """Whether its process is believed to run."""
    loaded: bool = False
    """Whether it has been ready since its last start."""
    killed: bool = False
    """Whether a kill was ordered."""
    deaths: int = 0
    """Deaths in succession."""
    restarts: int = 0
    last_error: str | None = None
    work: StallTracker = field(default_factory=StallTracker)
    """CPU time and silence since its last progress in loading, or since its last heartbeat."""
    doing: str = ""
    """What it last reported while loading."""
    usage_known: bool = False
    """Whether the CPU time of its process is reported."""
    uncounted_s: float = 0.0
    """Time not yet counted in ``work``, on the supervisor's clock."""
    used_cpu_s: float = 0.0
    """CPU time of its process since its start."""
    read_bytes: int = 0
    """Bytes that its process has read from disks."""
    ready_ns: int = 0
    restart_ns: int = 0
    """When it is started again, in state WAITING."""
    residences: dict[str, Residence] = field(default_factory=dict)
    """The services declared on it, by name."""
    unplaced: set[str] = field(default_factory=set)
    """Services of these that it takes no new requests of; those that it has migrate away."""
    deactivating: bool = False
    """Whether it goes to standby once it is drained."""
    stopping: bool = False
    """Whether its end was ordered because it goes to standby."""
    calls: dict[str, ManagedCall] = field(default_factory=dict)
    next_drain_ns: int = 0
    """While draining: no migration before this time, because a destination had no room."""
    reserved: ManagedCall | None = None
    """A quarantined request that is to run on it alone."""
    kv_formats: dict[str, str] = field(default_factory=dict)
    """Format of its KV by service, where it can migrate."""
    kv_bytes: int = 0
    """Memory for KV; 0: unknown."""
    block_size: int = 1
    host: str = ""
    """The machine that it runs on; empty: a machine of its own."""
    withdrawn: int = 0
    """Requests that a packer withdrew from it because no engine had room."""
    leases: Counter[str] = field(default_factory=Counter)
    """By service: migrating requests for which it keeps KV blocks. They arrive, or may return."""
    migrations: Counter[tuple[MigrationMethod, MigrationOutcome]] = field(default_factory=Counter)
    """Finished migrations from it."""

    @property
    def name(self) -> str:
        """Its name in the cluster."""
        return self.load.name

    @property
    def services(self) -> tuple[str, ...]:
        return tuple(self.residences)

    def serves(self, service: str) -> bool:
        """Whether a service is loaded, and placed here."""
        return self.residences.get(service) is Residence.LOADED and service not in self.unplaced

    def places(self, service: str) -> bool:
        """Whether a service is placed here: the engine takes its requests once it is ready and has it."""
        return service in self.residences and service not in self.unplaced

    @property
    def active(self) -> bool:
        """Whether it takes requests, or will once it runs."""
        return self.state not in (EngineState.DRAINING, EngineState.STANDBY)

    def leaves(self, call: ManagedCall) -> bool:
        """Whether one of its requests is to migrate away."""
        return self.state is EngineState.DRAINING or call.service in self.unplaced

    def needs(self, service: str) -> bool:
        """Whether it has requests of a service, or keeps KV for migrating ones."""
        return bool(self.load.requests(service) or self.leases[service])

    def has_room(self, submitted: Submitted) -> bool:
        """Whether its whole KV memory holds a request at its largest length."""
        tokens = self.load.kv_tokens.get(submitted.service)
        return tokens is None or submitted.longest <= tokens

    @property
    def accepts_requests(self) -> bool:
        """Whether it is ready, and no kill was ordered."""
        return self.state is EngineState.READY and not self.killed

    @property
    def alive(self) -> bool:
        """Whether its process runs, and no kill was ordered."""
        return self.runs and not self.killed

    @property
    def idle(self) -> bool:
        """Whether it has no requests and keeps no KV for migrating ones."""
        return not self.calls and not self.leases

    @property
    def will_accept_requests(self) -> bool:
        """Whether it will accept requests later, unless its start fails."""
        return self.active and not self.accepts_requests

    def transition_to(self, state: EngineState) -> None:
        """Change the state; raises RuntimeError if that is not allowed."""
        if state not in TRANSITIONS[self.state]:
            raise RuntimeError(f"engine {self.name} cannot go from {self.state} to {state}")
        self.state = state

    def status(self) -> EngineStatus:
        """What others may know of it, without what the router knows of its process."""
        return EngineStatus(
            name=self.name,
            state=self.state,
            services=self.services,
            unplaced=tuple(name for name in self.residences if name in self.unplaced),
            deactivating=self.deactivating,
            stopping=self.stopping,
            incarnation=self.incarnation,
            restarts=self.restarts,
            requests=len(self.calls),
            leases=self.leases.total(),
            migrations=dict(self.migrations),
            withdrawn=self.withdrawn,
            last_error=self.last_error,
        )


OfEngine = (
    EngineReady
    | EngineHeartbeat
    | EngineLoading
    | EngineProcessUsage
    | EngineEnded
    | ServiceLoaded
    | ServiceFailed
    | ServiceUnloaded
    | WeightsMoved
)
"""Events about one start of an engine."""


def running_engine(engines: Mapping[str, Engine], event: OfEngine) -> Engine | None:
    """The engine of an event, if that start of it still runs."""
    engine = engines.get(event.engine)
    present = engine is not None and engine.runs and engine.incarnation == event.incarnation
    return engine if present else None
