"""The messages between an engine process and its client: msgpack, one message per step.

Every message is one ZeroMQ frame. Requests and events travel as arrays without field names.
"""

import msgspec

from shoal.core import (
    SLO,
    ConfigError,
    EngineDied,
    ModelUnavailable,
    ModelUnsupported,
    Request,
    SamplingParams,
    ShoalError,
    TokenEvent,
    TokenLogprobs,
)
from shoal.core.request import FinishReason
from shoal.engine.info import EngineInfo
from shoal.engine.stats import EngineStats


class Submit(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """To the engine: run a request."""

    id: str
    service: str
    prompt: list[int]
    sampling: SamplingParams
    arrival_ns: int
    seed: int
    slo: SLO

    @classmethod
    def from_request(cls, request: Request, prompt: list[int]) -> "Submit":
        """The message for ``request``, whose prompt must be token ids."""
        return cls(
            request.id,
            request.service,
            prompt,
            request.sampling,
            request.arrival_ns,
            request.seed,
            request.slo,
        )

    def to_request(self) -> Request:
        """The request that was sent."""
        return Request(
            id=self.id,
            service=self.service,
            prompt=self.prompt,
            sampling=self.sampling,
            arrival_ns=self.arrival_ns,
            seed=self.seed,
            slo=self.slo,
        )


class Cancel(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """To the engine: these requests are no longer wanted; ``complete``: because a stop string ended them."""

    ids: list[str]
    complete: bool = False


class AskStats(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """To the engine: answer with Stats of the same ``key``."""

    key: int


class Shutdown(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """To the engine: end now, whatever is unfinished."""


class Event(msgspec.Struct, array_like=True, frozen=True):
    """A TokenEvent on the wire."""

    request_id: str
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] | None = None
    finish: FinishReason | None = None
    stop_token: int | None = None
    error: str | None = None
    cached_tokens: int = 0

    @classmethod
    def from_event(cls, event: TokenEvent) -> "Event":
        """The message for ``event``."""
        return cls(
            event.request_id,
            event.tokens,
            event.logprobs,
            event.finish,
            event.stop_token,
            event.error,
            event.cached_tokens,
        )

    def to_event(self) -> TokenEvent:
        """The event that was sent."""
        return TokenEvent(
            self.request_id,
            self.tokens,
            self.logprobs,
            self.finish,
            self.stop_token,
            self.error,
            self.cached_tokens,
        )


class Stepped(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """From the engine: everything one step did."""

    events: list[Event]


class Refused(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """From the engine: a submitted request can never be served (InvalidRequest)."""

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
