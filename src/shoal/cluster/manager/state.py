"""What a manager remembers of engines and requests."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto

from shoal.cluster.manager.actions import MoveOutcome
from shoal.cluster.manager.engine_load import EngineLoad
from shoal.cluster.manager.events import (
    EngineBeat,
    EngineEnded,
    EngineLoading,
    EngineReady,
    EngineWorked,
    MoveMethod,
    ServiceFailed,
    ServiceLoaded,
    ServiceUnloaded,
    Submitted,
)
from shoal.cluster.status import EngineState
from shoal.engine.process.stall_tracker import StallTracker

TRANSITIONS: Mapping[EngineState, frozenset[EngineState]] = {
    EngineState.WAITING: frozenset({EngineState.LOADING, EngineState.DRAINING}),
    EngineState.LOADING: frozenset({EngineState.READY, EngineState.WAITING, EngineState.DRAINING}),
    EngineState.READY: frozenset({EngineState.WAITING, EngineState.DRAINING}),
    EngineState.DRAINING: frozenset({EngineState.WAITING, EngineState.LOADING, EngineState.READY}),
}
"""Where an engine may go from each state; one that is removed is forgotten in any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ManagedEngine:
    """What a manager knows of one engine."""

    name: str
    """Its name in the cluster."""
    state: EngineState
    """Where it is in its life."""
    services: tuple[str, ...]
    """What it is to serve."""
    incarnation: int
    """How often it was started."""
    restarts: int
    """How often the manager started it again."""
    requests: int
    """Requests that it has not finished."""
    last_error: str | None
    """Why it ended last."""
    leases: int
    """Requests of other engines for which it keeps blocks."""
    moves: Mapping[tuple[MoveMethod, MoveOutcome], int]
    """Migrations from it that are over."""
    withdrawn: int
    """Requests that a packer took from it, because they had room nowhere any more."""


class Residence(Enum):
    """Whether an engine has a service in its memory that is placed there."""

    ABSENT = auto()
    """It has not."""
    LOADING = auto()
    """It was told to load it."""
    LOADED = auto()
    """It has."""
    UNLOADING = auto()
    """It was told to give it up."""
    FAILED = auto()
    """It could not load it."""


@dataclass(slots=True, eq=False)
class Call:
    """One unfinished request."""

    told: Submitted
    """As it was submitted."""
    number: int
    """How many were submitted before it."""
    tokens: int
    """Output tokens that are expected of each choice."""
    attempt: int = 0
    """How often it was dispatched."""
    engine: "Engine | None" = None
    """Who has it; None: it waits."""
    waiting_since_ns: int = 0
    """When it began to wait, if it waits."""
    deaths: int = 0
    """Engines that died in its steps since it got a token after being dispatched again."""
    deaths_alone: int = 0
    """Those of them that had nothing else to do."""
    quarantined_ns: int | None = None
    """Since when it runs alone only; None: it may run with others."""
    migration: str | None = None
    """The migration that it is in; None: it stays where it is."""
    moves_kv: bool = True
    """Whether its KV may be moved, and could be when that was tried."""
    stays_until_ns: int = 0
    """It is not moved before, because that could not be done."""

    @property
    def number_and_service(self) -> tuple[int, str]:
        """When it came, and what it asks for."""
        return self.number, self.told.service

    @property
    def suspected(self) -> bool:
        """Whether an engine may have died of it."""
        return self.deaths > 0 or self.quarantined_ns is not None


@dataclass(slots=True, eq=False)
class Engine:
    """One engine that is wanted."""

    load: EngineLoad
    """What it has to do, as policies see it."""
    state: EngineState
    """Where it is in its life."""
    incarnation: int
    """How often it was started."""
    runs: bool
    """Whether its process is thought to run."""
    loaded: bool = False
    """Whether it has been ready since it was started."""
    killed: bool = False
    """Whether it was told to be killed."""
    deaths: int = 0
    """In succession."""
    restarts: int = 0
    """How often it was started again."""
    last_error: str | None = None
    """Why it ended last."""
    work: StallTracker = field(default_factory=StallTracker)
    """What was seen of it since it got on with loading, or later since its last sign of life."""
    doing: str = ""
    """What it told last that it does, while it loads."""
    seen: bool = False
    """Whether it was told what its process uses."""
    unseen_s: float = 0.0
    """Time that ``work`` has not counted, on the supervisor's clock."""
    used_cpu_s: float = 0.0
    """CPU time of its process since it was started."""
    read_bytes: int = 0
    """What its process has read from disks."""
    ready_ns: int = 0
    """When it became ready last."""
    restart_ns: int = 0
    """When it is to be started again, where it waits for that."""
    residences: dict[str, Residence] = field(default_factory=dict)
    """The services that are placed on it, by name."""
    calls: dict[str, Call] = field(default_factory=dict)
    """The requests that it has, by id."""
    drains_again_ns: int = 0
    """While it is drained: when requests are moved away again, after a destination had no room."""
    reserved: Call | None = None
    """A request that is to run on it alone."""
    kv_formats: dict[str, str] = field(default_factory=dict)
    """What KV it has, by service, where it can be moved."""
    kv_bytes: int = 0
    """Its memory for KV; 0: not known."""
    block_size: int = 1
    """Tokens in a block."""
    host: str = ""
    """The machine that it runs on; empty: one of its own."""
    withdrawn: int = 0
    """Requests that a packer took from it, because they had room nowhere any more."""
    leases: int = 0
    """Requests of other engines for which it keeps blocks: they come, or may come back."""
    moves: Counter[tuple[MoveMethod, MoveOutcome]] = field(default_factory=Counter)
    """Migrations from it that are over."""

    @property
    def name(self) -> str:
        """Its name in the cluster."""
        return self.load.name

    @property
    def services(self) -> tuple[str, ...]:
        """What it is to serve."""
        return tuple(self.residences)

    def serves(self, service: str) -> bool:
        """Whether it has a service in its memory."""
        return self.residences.get(service) is Residence.LOADED

    def has_room(self, told: Submitted) -> bool:
        """Whether its memory holds a request as long as it may become, if it has nothing else."""
        tokens = self.load.kv_tokens.get(told.service)
        return tokens is None or told.longest <= tokens

    @property
    def takes_requests(self) -> bool:
        """Whether it is ready and will be."""
        return self.state is EngineState.READY and not self.killed

    @property
    def lives(self) -> bool:
        """Whether its process runs and will."""
        return self.runs and not self.killed

    @property
    def idle(self) -> bool:
        """Whether it has no requests, and none that may come back."""
        return not self.calls and not self.leases

    @property
    def comes(self) -> bool:
        """Whether it will take requests later, unless its start fails."""
        return not self.takes_requests and self.state is not EngineState.DRAINING

    def move(self, state: EngineState) -> None:
        """Go to another state; RuntimeError where that is not allowed."""
        if state not in TRANSITIONS[self.state]:
            raise RuntimeError(f"engine {self.name} cannot go from {self.state} to {state}")
        self.state = state

    def view(self) -> ManagedEngine:
        """What others may know."""
        return ManagedEngine(
            name=self.name,
            state=self.state,
            services=self.services,
            incarnation=self.incarnation,
            restarts=self.restarts,
            requests=len(self.calls),
            last_error=self.last_error,
            leases=self.leases,
            moves=dict(self.moves),
            withdrawn=self.withdrawn,
        )


OfEngine = (
    EngineReady
    | EngineBeat
    | EngineLoading
    | EngineWorked
    | EngineEnded
    | ServiceLoaded
    | ServiceFailed
    | ServiceUnloaded
)
"""What is told of one start of an engine."""


def running_engine(engines: Mapping[str, Engine], event: OfEngine) -> Engine | None:
    """The engine that an event tells of, if it is the one that runs now."""
    engine = engines.get(event.engine)
    present = engine is not None and engine.runs and engine.incarnation == event.incarnation
    return engine if present else None
