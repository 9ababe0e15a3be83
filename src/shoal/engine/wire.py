"""The messages between an engine process and its client: msgpack, one message per step.

Every message is one ZeroMQ frame. Events, of which there are most, travel as arrays without field names.
"""

from collections.abc import Sequence
from dataclasses import replace

import msgspec

from shoal.core import (
    ConfigError,
    EngineDied,
    ModelUnavailable,
    ModelUnsupported,
    Request,
    ShoalError,
    TokenEvent,
)
from shoal.engine.info import EngineInfo
from shoal.engine.stats import EngineStats


class Submit(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """To the engine: run the choices of one call: all are as ``request``, but for their id and seed."""

    request: Request
    choices: list[tuple[str, int]]

    @classmethod
    def from_requests(cls, requests: Sequence[Request]) -> "Submit":
        """The message for requests of one call."""
        return cls(requests[0], [(request.id, request.seed) for request in requests])

    def to_requests(self) -> list[Request]:
        """The requests that were sent; they share one prompt."""
        return [replace(self.request, id=id, seed=seed) for id, seed in self.choices]


class Cancel(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """To the engine: these requests are no longer wanted; ``complete``: because a stop string ended them."""

    ids: list[str]
    complete: bool = False


class AskStats(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """To the engine: answer with Stats of the same ``key``."""

    key: int


class Shutdown(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """To the engine: end now, whatever is unfinished."""


class Stepped(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """From the engine: everything one step did."""

    events: list[TokenEvent]


class Refused(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """From the engine: the call to which this request belongs can never be served (InvalidRequest)."""

    request_id: str
    message: str
    param: str | None = None
    code: str | None = None


class Loading(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """From the engine: what it does while it loads."""

    what: str


class Ready(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """From the engine: loading is done."""

    info: EngineInfo


class Failed(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """From the engine, as its last word: the error that ends it, by the name of its class."""

    kind: str
    message: str


class Stats(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """From the engine: the answer to AskStats."""

    key: int
    stats: EngineStats


ToEngine = Submit | Cancel | AskStats | Shutdown
FromEngine = Stepped | Refused | Loading | Ready | Failed | Stats

_encoder = msgspec.msgpack.Encoder()
_to_engine: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
_from_engine: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)


def encode(message: ToEngine | FromEngine) -> bytes:
    """One frame."""
    return _encoder.encode(message)


def decode_to_engine(frame: bytes) -> ToEngine:
    """A message that the client sent."""
    return _to_engine.decode(frame)


def decode_from_engine(frame: bytes) -> FromEngine:
    """A message that the engine sent."""
    return _from_engine.decode(frame)


_ACTIONABLE = {error.__name__: error for error in (ConfigError, ModelUnavailable, ModelUnsupported)}


def describe_failure(error: BaseException) -> Failed:
    """The last word of an engine that ends with ``error``."""
    return Failed(type(error).__name__, str(error) or type(error).__name__)


def is_actionable(error: BaseException) -> bool:
    """Whether ``error`` tells a person all there is to know, so that no traceback is needed."""
    return type(error).__name__ in _ACTIONABLE


def failure_to_error(failed: Failed, doing: str) -> ShoalError:
    """The error to raise on the client's side: the same class where a person can act on it."""
    known = _ACTIONABLE.get(failed.kind)
    if known is not None:
        return known(failed.message)
    return EngineDied(f"the engine failed while {doing}: {failed.kind}: {failed.message}")
