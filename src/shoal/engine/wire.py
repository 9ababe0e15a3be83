"""The messages between an engine process and its client: msgpack, one message for all events of a step.

Every message is one ZeroMQ frame. Events, of which there are most, travel as arrays without field names.
"""

from collections.abc import Sequence
from dataclasses import replace

import msgspec

from shoal.core import (
    Request,
    ResumeState,
    Service,
    TokenEvent,
)
from shoal.engine.info import ServiceInfo
from shoal.engine.migration import wire as migration_wire
from shoal.engine.process.lifeline import PROTOCOL as PROTOCOL
from shoal.engine.stats import EngineStats


class Hello(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """To the engine, as the first message: its sender is the client from now on, and nobody else is."""

    protocol: int
    """``PROTOCOL`` of the sender."""
    session: str
    """Names the sender, for the log."""
    now_ns: int
    """The sender's clock, on which its requests arrive."""


class Choice(msgspec.Struct, array_like=True, frozen=True):
    """One choice of a call, by what it does not share with the others."""

    id: str
    """Its request's id."""
    seed: int
    """Its request's seed."""
    output_tokens: tuple[int, ...] | int = ()
    """As in ``Request``."""
    resume_state: ResumeState | None = None
    """As in ``Request``."""
    prompt_logprobs: int | None = None
    """As in ``SamplingParams``: only the first choice has it."""


class Submit(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """To the engine: run the choices of one call."""

    request: Request
    """What all choices have in common: all but what a ``Choice`` has."""
    choices: list["Choice"]
    """What each choice has of its own."""

    @classmethod
    def from_requests(cls, requests: Sequence[Request]) -> "Submit":
        """The message for requests of one call."""
        choices = [
            Choice(
                request.id,
                request.seed,
                request.output_tokens,
                request.resume_state,
                request.sampling.prompt_logprobs,
            )
            for request in requests
        ]
        return cls(replace(requests[0], output_tokens=(), resume_state=None), choices)

    def to_requests(self) -> list[Request]:
        """The requests that were sent; they share one prompt."""
        return [
            replace(
                self.request,
                id=choice.id,
                seed=choice.seed,
                output_tokens=choice.output_tokens,
                resume_state=choice.resume_state,
                sampling=replace(self.request.sampling, prompt_logprobs=choice.prompt_logprobs),
            )
            for choice in self.choices
        ]


class Cancel(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """To the engine: end requests."""

    ids: list[str]
    """Their ids."""
    complete: bool = False
    """A stop string ended them, so they count as finished."""


class AskStats(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """To the engine: send Stats."""

    key: int
    """Returned with them."""


class AddService(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """To the engine: load a service while others go on, and send ServiceChanged."""

    key: int
    """Returned with it."""
    service: Service
    """The service."""
    folder: str
    """Where its model lies."""


class RemoveService(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """To the engine: take no further requests of a service, let it go, and send ServiceChanged."""

    key: int
    """Returned with it."""
    name: str
    """Its name."""
    drain: bool
    """Its requests run to their ends; else they are cancelled."""


class Stepped(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """From the engine: all events of one step."""

    events: list[TokenEvent]
    """What it did for each request."""


class Refused(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """From the engine: a call can never be served, or not now."""

    request_id: str
    """A request of the call."""
    message: str
    """Message of the InvalidRequest or QueueFull."""
    param: str | None = None
    """Its ``param``."""
    code: str | None = None
    """Its ``code``."""
    retry_after_s: float | None = None
    """It was a QueueFull: there is room again probably after this time."""


class Accepted(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """From the engine: a call whose output must follow a grammar can do so, and is submitted."""

    request_id: str
    """Its first request."""


class Forgotten(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """From the engine to somebody who is not its client, or is not any more: it has none of its requests.

    Also what a client tells itself when the connection is lost.
    """


class Stats(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """From the engine: the response to AskStats."""

    key: int
    """That of the question."""
    stats: EngineStats
    """Its stats."""


class ServiceChanged(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """From the engine: the response to AddService and RemoveService, when it is done or cannot be."""

    key: int
    """That of the question."""
    services: dict[str, ServiceInfo]
    """Limits of all services that there are now: those of others change as well."""
    weight_bytes: int
    """Size of all weights that are loaded now."""
    error: str | None = None
    """Why nothing has changed."""


ToEngine = Hello | Submit | Cancel | AskStats | AddService | RemoveService | migration_wire.ToEngine
FromEngine = Stepped | Refused | Accepted | Forgotten | Stats | ServiceChanged | migration_wire.FromEngine

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
