"""Events that the manager handles: plain values in the order in which they happened, logged and replayed.

A request here is a client's call: its ``n`` choices go to one engine together. ``engine`` is a name, and
``incarnation`` says which start of that engine is meant, from 1.
"""

from enum import StrEnum

import msgspec

from shoal.engine.absent_weights import AbsentWeights


class MigrationMethod(StrEnum):
    """How a running request migrates to another engine."""

    LIVE = "live"
    """Its KV is sent while it runs, and the rest when it has stopped."""
    STOP = "stop"
    """It stops, and then its KV is sent."""
    TOKENS = "tokens"
    """The destination recomputes its KV from its tokens."""


class ServiceSpeed(msgspec.Struct, frozen=True, array_like=True):
    """Speed of one service on one engine, for a request that runs alone."""

    prefill_s: float
    """Seconds per prompt token."""
    decode_s: float
    """Seconds per output token."""


class EngineAdded(msgspec.Struct, frozen=True, tag=True):
    """An engine is added; the manager starts it."""

    engine: str
    services: tuple[str, ...]


class EngineFound(msgspec.Struct, frozen=True, tag=True):
    """An engine is added that runs already: an earlier server started it."""

    engine: str
    incarnation: int
    services: tuple[str, ...]


class EngineReady(msgspec.Struct, frozen=True, tag=True):
    """An engine has loaded and accepts requests."""

    engine: str
    incarnation: int
    speeds: dict[str, ServiceSpeed]
    kv_formats: dict[str, str] = {}
    """By service: KV can migrate to engines of the same format. Absent where it cannot migrate."""
    kv_bytes: int = 0
    """Memory for KV; 0: unknown."""
    kv_tokens: dict[str, int] = {}
    """By service: tokens that fill ``kv_bytes``."""
    block_size: int = 1
    host: str = ""
    """The machine that it runs on; empty: a machine of its own."""


class EngineHeartbeat(msgspec.Struct, frozen=True, tag="EngineBeat"):
    """A heartbeat of an engine, also while it loads."""

    engine: str
    incarnation: int
    hung: str = ""
    """Why its present step counts as hung; empty: it does not."""


class EngineLoading(msgspec.Struct, frozen=True, tag=True):
    """A loading engine made progress."""

    engine: str
    incarnation: int
    what: str
    """What it loads now, in words."""


class EngineProcessUsage(msgspec.Struct, frozen=True, tag="EngineWorked"):
    """Resources that an engine's process has used since its start, measured from outside."""

    engine: str
    incarnation: int
    cpu_s: float
    read_bytes: int
    """Bytes read from disks; 0 where unknown."""


class EngineEnded(msgspec.Struct, frozen=True, tag=True):
    """An engine's process ended, or its connection is lost."""

    engine: str
    incarnation: int
    reason: str
    suspects: tuple[str, ...] = ()
    """Requests in the steps that it was computing."""


class EngineDraining(msgspec.Struct, frozen=True, tag=True):
    """An engine gets no new requests from now on."""

    engine: str


class EngineUndrained(msgspec.Struct, frozen=True, tag=True):
    """A drained engine gets requests again."""

    engine: str


class EngineActivated(msgspec.Struct, frozen=True, tag=True):
    """An engine on standby is started, or one that drains to go there takes requests again."""

    engine: str


class EngineDeactivated(msgspec.Struct, frozen=True, tag=True):
    """An engine goes to standby: it is drained, and then ends.

    Ignored where it is the only active one of a service that is placed on it.
    """

    engine: str


class EngineRemoved(msgspec.Struct, frozen=True, tag=True):
    """An engine is removed; its requests go to other engines."""

    engine: str


class ServicePlaced(msgspec.Struct, frozen=True, tag=True):
    """A service is placed on more engines, which load it."""

    service: str
    engines: tuple[str, ...]
    idle_after_s: float | None = None
    """It is unloaded after this time without a request; None: never."""


class ServiceWanted(msgspec.Struct, frozen=True, tag=True):
    """A service is to be loaded where it is placed, or unloaded until a request comes."""

    service: str
    loaded: bool


class PlacementWanted(msgspec.Struct, frozen=True, tag=True):
    """A service is placed on one engine more, or is no longer placed on one.

    Ignored where no other active engine would have the service.
    """

    service: str
    engine: str
    placed: bool
    """True: the engine loads the service and takes its requests. False: it takes no more of them, and those
    that it has migrate away."""
    unload: bool = True
    """If no longer placed: whether the engine unloads the service once it has no requests of it."""


class ServiceKept(msgspec.Struct, frozen=True, tag=True):
    """A new idle time of a loaded service, counted from now; an unload restores that of ``ServicePlaced``."""

    service: str
    idle_after_s: float | None
    """0: it is unloaded as soon as it has no request. None: it stays loaded."""


class ServiceRemoved(msgspec.Struct, frozen=True, tag=True):
    """A service is removed: it is unloaded once its requests have ended."""

    service: str


class ServiceLoaded(msgspec.Struct, frozen=True, tag=True):
    """An engine has loaded a service."""

    engine: str
    incarnation: int
    service: str
    speed: ServiceSpeed
    kv_format: str = ""
    """As in ``EngineReady``."""
    kv_tokens: dict[str, int] = {}
    """As in ``EngineReady``, of all services: the memory is divided again."""


class ServiceFailed(msgspec.Struct, frozen=True, tag=True):
    """An engine could not load a service."""

    engine: str
    incarnation: int
    service: str
    error: str


class ServiceUnloaded(msgspec.Struct, frozen=True, tag=True):
    """An engine has freed the weights and the KV of a service."""

    engine: str
    incarnation: int
    service: str
    kv_tokens: dict[str, int] = {}
    """As in ``ServiceLoaded``."""


class WeightsMoved(msgspec.Struct, frozen=True, tag=True):
    """Weights came to the memory of an engine, or left it."""

    engine: str
    incarnation: int
    absent: tuple[AbsentWeights, ...]
    """All that are absent now; none are when an engine becomes ready."""


class Submitted(msgspec.Struct, frozen=True, tag=True, rename={"kv_transferable": "moves_kv"}):
    """A request was accepted."""

    request: str
    service: str
    prompt_tokens: int
    most_tokens: int
    """Output limit of one choice."""
    choices: int = 1
    prefix: tuple[int, ...] = ()
    """A hash per full block of the prompt, with all blocks before it, if the dispatch policy reads them."""
    kv_transferable: bool = True
    """Whether it may migrate with its KV: it is one sequence without other state."""
    predicted_tokens: int = 0
    """Predicted output of one choice, for batches; 0: none."""
    goal_s: float | None = None
    """Goal of its end-to-end latency, for batches; None: it has none."""

    @property
    def longest(self) -> int:
        """Largest length of one choice in tokens, prompt and output."""
        return self.prompt_tokens + self.most_tokens


class Progressed(msgspec.Struct, frozen=True, tag=True):
    """A request got its first token after it was dispatched again; once per attempt except the first."""

    request: str


class SliceEnded(msgspec.Struct, frozen=True, tag=True):
    """The slice of a request is over at its engine, which no longer has it; it waits for another batch."""

    request: str
    output_tokens: int
    """Of its shortest unfinished choice so far: the others have less left."""


class WeightsFailed(msgspec.Struct, frozen=True, tag=True):
    """An engine gave a request up, since it cannot load its weights."""

    request: str
    error: str


class Ended(msgspec.Struct, frozen=True, tag=True):
    """A request finished, failed or was cancelled."""

    request: str
    output_tokens: int | None = None
    """Output length (the mean of its choices) if it finished normally."""
    met: bool | None = None
    """Whether all of its choices met their goals; None: it has no goals, or was cancelled."""


class MigrationWanted(msgspec.Struct, frozen=True, tag="MoveWanted"):
    """A running request is to migrate to another engine; ignored where that is impossible."""

    request: str
    engine: str | None
    """The destination; None: the dispatch policy chooses."""
    method: MigrationMethod
    """TOKENS is used where its KV cannot migrate."""


class MigrationReserved(msgspec.Struct, frozen=True, tag="MoveReserved"):
    """The destination of a migration has room for the request."""

    migration: str


class MigrationDeclined(msgspec.Struct, frozen=True, tag="MoveDeclined"):
    """The destination of a migration has no room."""

    migration: str
    why: str


class MigrationCopied(msgspec.Struct, frozen=True, tag="MoveCopied"):
    """The source of a migration has sent more of the KV."""

    migration: str


class MigrationStopped(msgspec.Struct, frozen=True, tag="MoveStopped"):
    """The source has stopped the request and sent the last of its KV; all of its output was delivered."""

    migration: str


class MigrationNotExported(msgspec.Struct, frozen=True, tag="MoveNotExported"):
    """The source did not send the request, which is not running or has ended."""

    migration: str
    why: str


class MigrationFailed(msgspec.Struct, frozen=True, tag="MoveFailed"):
    """The destination of a migration does not have the request."""

    migration: str
    why: str


class EpochBegan(msgspec.Struct, frozen=True, tag=True):
    """A packing epoch begins: the packer looks at how requests have grown."""

    output_tokens: dict[str, int]
    """By unfinished request: output tokens of all its choices so far."""


class Ticked(msgspec.Struct, frozen=True, tag=True):
    """Time passed, and the event loop was running."""


ServiceEvent = (
    ServicePlaced
    | ServiceWanted
    | PlacementWanted
    | ServiceKept
    | ServiceRemoved
    | ServiceLoaded
    | ServiceFailed
    | ServiceUnloaded
)
MigrationEvent = (
    MigrationReserved
    | MigrationDeclined
    | MigrationCopied
    | MigrationStopped
    | MigrationNotExported
    | MigrationFailed
)
"""Engines' answers about migrations."""
ClusterEvent = (
    EngineAdded
    | EngineFound
    | EngineReady
    | EngineHeartbeat
    | EngineLoading
    | EngineProcessUsage
    | EngineEnded
    | EngineDraining
    | EngineUndrained
    | EngineActivated
    | EngineDeactivated
    | EngineRemoved
    | ServiceEvent
    | WeightsMoved
    | Submitted
    | Progressed
    | SliceEnded
    | WeightsFailed
    | Ended
    | MigrationWanted
    | MigrationEvent
    | EpochBegan
    | Ticked
)
