"""What a manager is told, in the order in which it happened: plain values that can be logged and replayed.

A request here is a call: its ``n`` choices go to one engine together.
"""

from enum import StrEnum

import msgspec


class MoveMethod(StrEnum):
    """How a running request gets from one engine to another."""

    LIVE = "live"
    """Its KV is sent while it runs, and the last of it when it has stopped."""
    STOP = "stop"
    """It stops, and then its KV is sent."""
    TOKENS = "tokens"
    """Its KV is computed anew from its tokens."""


class ServiceSpeed(msgspec.Struct, frozen=True, array_like=True):
    """How fast one engine computes one service, for a request that runs alone."""

    prefill_s: float
    """For each token of a prompt."""
    decode_s: float
    """For each token of output."""


class EngineAdded(msgspec.Struct, frozen=True, tag=True):
    """An engine is wanted from now on; the manager starts it."""

    engine: str
    """Its name."""
    services: tuple[str, ...]
    """What it is to serve."""


class EngineFound(msgspec.Struct, frozen=True, tag=True):
    """An engine that is wanted runs already: it was started by an earlier server."""

    engine: str
    """Its name."""
    incarnation: int
    """How often it was started."""
    services: tuple[str, ...]
    """What it is to serve."""


class EngineReady(msgspec.Struct, frozen=True, tag=True):
    """An engine has loaded and takes requests."""

    engine: str
    """Its name."""
    incarnation: int
    """Which start of it."""
    speeds: dict[str, ServiceSpeed]
    """By service."""
    kv_formats: dict[str, str] = {}
    """By service: KV can go to engines of the same format; there is none where it cannot be moved."""
    kv_bytes: int = 0
    """Memory for KV; 0: not known."""
    kv_tokens: dict[str, int] = {}
    """By service: tokens that fill that memory."""
    block_size: int = 1
    """Tokens in a block: a request takes up whole blocks."""
    host: str = ""
    """The machine that it runs on; empty: it shares its machine with no other engine."""


class EngineBeat(msgspec.Struct, frozen=True, tag=True):
    """A heartbeat of an engine, loading or not."""

    engine: str
    """Its name."""
    incarnation: int
    """Which start of it."""
    hung: str = ""
    """Why its present step counts as hung, in words; empty: it does not."""


class EngineLoading(msgspec.Struct, frozen=True, tag=True):
    """An engine that loads has got on."""

    engine: str
    """Its name."""
    incarnation: int
    """Which start of it."""
    what: str
    """What it does now."""


class EngineWorked(msgspec.Struct, frozen=True, tag=True):
    """What an engine's process has used since its start, as others see it, whatever it does."""

    engine: str
    """Its name."""
    incarnation: int
    """Which start of it."""
    cpu_s: float
    """CPU time."""
    read_bytes: int
    """What was read from disks, where that is known."""


class EngineEnded(msgspec.Struct, frozen=True, tag=True):
    """An engine's process ended, or nothing more can be heard of it."""

    engine: str
    """Its name."""
    incarnation: int
    """Which start of it."""
    reason: str
    """Why, in words."""
    suspects: tuple[str, ...] = ()
    """Requests of the steps that it was computing."""


class EngineDraining(msgspec.Struct, frozen=True, tag=True):
    """An engine gets no new requests from now on."""

    engine: str
    """Its name."""


class EngineUndrained(msgspec.Struct, frozen=True, tag=True):
    """An engine that was drained gets requests again."""

    engine: str
    """Its name."""


class EngineRemoved(msgspec.Struct, frozen=True, tag=True):
    """An engine is not wanted any more; its requests go elsewhere."""

    engine: str
    """Its name."""


class ServicePlaced(msgspec.Struct, frozen=True, tag=True):
    """A service is wanted on engines, beside what they serve already: it is loaded there."""

    service: str
    """Its name."""
    engines: tuple[str, ...]
    """Engines that are to serve it."""
    idle_after_s: float | None = None
    """It is unloaded when it had no request for so long; None: never."""


class ServiceWanted(msgspec.Struct, frozen=True, tag=True):
    """A service is to be loaded where it is placed, or unloaded; then a request wakes it up."""

    service: str
    """Its name."""
    loaded: bool
    """Which of both."""


class ServiceKept(msgspec.Struct, frozen=True, tag=True):
    """A service that is loaded is to stay so from now on, until it had no request for a time.

    That holds until it is unloaded; then it is again as the service was placed with.
    """

    service: str
    """Its name."""
    idle_after_s: float | None
    """The time; 0: it is unloaded as soon as it has no request, None: it stays."""


class ServiceRemoved(msgspec.Struct, frozen=True, tag=True):
    """A service is not wanted any more: it is unloaded once its requests have ended, and forgotten."""

    service: str
    """Its name."""


class ServiceLoaded(msgspec.Struct, frozen=True, tag=True):
    """An engine serves another service from now on."""

    engine: str
    """Its name."""
    incarnation: int
    """Which start of it."""
    service: str
    """The service."""
    speed: ServiceSpeed
    """How fast it is computed there."""
    kv_format: str = ""
    """As in ``EngineReady``."""
    kv_tokens: dict[str, int] = {}
    """As in ``EngineReady``: the memory is divided anew between all services."""


class ServiceFailed(msgspec.Struct, frozen=True, tag=True):
    """An engine could not load a service."""

    engine: str
    """Its name."""
    incarnation: int
    """Which start of it."""
    service: str
    """The service."""
    error: str
    """Why."""


class ServiceUnloaded(msgspec.Struct, frozen=True, tag=True):
    """An engine has given up the weights and the KV of a service."""

    engine: str
    """Its name."""
    incarnation: int
    """Which start of it."""
    service: str
    """The service."""
    kv_tokens: dict[str, int] = {}
    """As in ``ServiceLoaded``."""


class Submitted(msgspec.Struct, frozen=True, tag=True):
    """A request was accepted."""

    request: str
    """Its id."""
    service: str
    """The service that is to answer."""
    prompt_tokens: int
    """Length of its prompt."""
    most_tokens: int
    """Most tokens of output of one choice."""
    choices: int = 1
    """How many choices it has."""
    prefix: tuple[int, ...] = ()
    """A hash for each full block of the prompt and all before it, where the dispatch reads them."""
    moves_kv: bool = True
    """Whether its KV may go to another engine: it is one sequence, and engines need nothing else of it."""

    @property
    def longest(self) -> int:
        """Most tokens of one choice, prompt and output."""
        return self.prompt_tokens + self.most_tokens


class Progressed(msgspec.Struct, frozen=True, tag=True):
    """A request got a token since it was dispatched again; told once for each attempt but the first."""

    request: str
    """Its id."""


class Ended(msgspec.Struct, frozen=True, tag=True):
    """A request is over: it finished, failed or was cancelled."""

    request: str
    """Its id."""
    output_tokens: int | None = None
    """Length of its output (the mean of its choices) if it finished by itself."""


class MoveWanted(msgspec.Struct, frozen=True, tag=True):
    """A running request is to go to another engine; where it cannot, nothing happens."""

    request: str
    """Its id."""
    engine: str | None
    """Which engine; None: whichever the dispatch chooses."""
    method: MoveMethod
    """How; by its tokens where its KV cannot be moved."""


class MoveReserved(msgspec.Struct, frozen=True, tag=True):
    """The destination of a migration has room for the request."""

    migration: str
    """Its id."""


class MoveDeclined(msgspec.Struct, frozen=True, tag=True):
    """It has none."""

    migration: str
    """Its id."""
    why: str
    """In words."""


class MoveCopied(msgspec.Struct, frozen=True, tag=True):
    """The source of a migration has sent more of the KV."""

    migration: str
    """Its id."""


class MoveStopped(msgspec.Struct, frozen=True, tag=True):
    """The source has stopped the request, and sent the last of its KV; all of its output was delivered."""

    migration: str
    """Its id."""


class MoveNotExported(msgspec.Struct, frozen=True, tag=True):
    """The source did nothing to the request, which does not run, or has ended."""

    migration: str
    """Its id."""
    why: str
    """In words."""


class MoveFailed(msgspec.Struct, frozen=True, tag=True):
    """The destination of a migration has nothing of the request."""

    migration: str
    """Its id."""
    why: str
    """In words."""


class EpochBegan(msgspec.Struct, frozen=True, tag=True):
    """It is time to look at how requests have grown, where the dispatch packs them."""

    output_tokens: dict[str, int]
    """By request that has not ended: tokens of all its choices so far."""


class Ticked(msgspec.Struct, frozen=True, tag=True):
    """Time passed, and the loop that tells of events was awake."""


ServiceEvent = (
    ServicePlaced
    | ServiceWanted
    | ServiceKept
    | ServiceRemoved
    | ServiceLoaded
    | ServiceFailed
    | ServiceUnloaded
)
"""What happens to services."""
MoveEvent = MoveReserved | MoveDeclined | MoveCopied | MoveStopped | MoveNotExported | MoveFailed
"""What engines say of migrations."""
ClusterEvent = (
    EngineAdded
    | EngineFound
    | EngineReady
    | EngineBeat
    | EngineLoading
    | EngineWorked
    | EngineEnded
    | EngineDraining
    | EngineUndrained
    | EngineRemoved
    | ServiceEvent
    | Submitted
    | Progressed
    | Ended
    | MoveWanted
    | MoveEvent
    | EpochBegan
    | Ticked
)
