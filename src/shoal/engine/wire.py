"""Wire messages between an engine process and its client: submit, cancel, events, stats, service changes.

Each message is one ZeroMQ frame of msgpack, encoded as an array without field names. One message carries all
events of a step.
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
from shoal.engine.absent_weights import AbsentWeights
from shoal.engine.info import ServiceInfo
from shoal.engine.migration import wire as migration_wire
from shoal.engine.process.lifeline import PROTOCOL as PROTOCOL
from shoal.engine.stats import EngineStats
from shoal.engine.step_samples import StepSample


class Hello(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """To the engine, as the first message: its sender becomes the only client."""

    protocol: int
    """The sender's ``PROTOCOL``."""
    session: str
    """The sender's name, for the log."""
    now_ns: int
    """The sender's clock, which arrival times of its requests are on."""


class Choice(msgspec.Struct, array_like=True, frozen=True):
    """The part of a choice's request that the choices of a call do not share."""

    id: str
    seed: int
    output_tokens: tuple[int, ...] | int = ()
    resume_state: ResumeState | None = None
    prompt_logprobs: int | None = None
    """As in ``SamplingParams``; only set for the first choice."""


class Submit(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """To the engine: run the choices of one call."""

    request: Request
    """The part of the request that all choices share."""
    choices: list["Choice"]

    @classmethod
    def from_requests(cls, requests: Sequence[Request]) -> "Submit":
        """The message for the requests of one call."""
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
        """The requests of the call, which share one prompt."""
        sampling = self.request.sampling
        return [
            replace(
                self.request,
                id=choice.id,
                seed=choice.seed,
                output_tokens=choice.output_tokens,
                resume_state=choice.resume_state,
                sampling=sampling
                if choice.prompt_logprobs == sampling.prompt_logprobs
                else replace(sampling, prompt_logprobs=choice.prompt_logprobs),
            )
            for choice in self.choices
        ]


class Cancel(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """To the engine: end requests."""

    ids: list[str]
    complete: bool = False
    """The requests were ended by stop strings, so they count as finished."""


class AskStats(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """To the engine: send Stats."""

    key: int
    """Returned in the reply."""


class AskSteps(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """To the engine: send Steps."""

    key: int
    """Returned in the reply."""


class AddService(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """To the engine: load a service while steps go on; the reply is ServiceChanged."""

    key: int
    """Returned in the reply."""
    service: Service
    folder: str
    """The model folder, on the engine's host."""


class RemoveService(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """To the engine: reject further requests of a service and unload it; the reply is ServiceChanged."""

    key: int
    """Returned in the reply."""
    name: str
    drain: bool
    """Whether unfinished requests run to their ends; else they are cancelled."""


class PinService(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """To the engine: have a service's weights always in its memory, or not; the reply is ServiceChanged."""

    key: int
    """Returned in the reply."""
    name: str
    pinned: bool


class Stepped(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """From the engine: all events of one step."""

    events: list[TokenEvent]


class Transition(msgspec.Struct, array_like=True, frozen=True):
    """A request was admitted to the running batch, or preempted."""

    request_id: str
    runs: bool
    """Whether it was admitted."""
    age_ns: int
    """How long before the message was sent."""


class Transitions(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """From the engine: admissions and preemptions in order, before the next tokens of these requests."""

    transitions: list[Transition]


class Refused(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """From the engine: a call is rejected, for good or for now."""

    request_id: str
    """The first request of the call, or a request that could not be resumed."""
    message: str
    """Message of the InvalidRequest or QueueFull; ``param`` and ``code`` are also the error's."""
    param: str | None = None
    code: str | None = None
    retry_after_s: float | None = None
    """The error was a QueueFull: when to retry; None: it was an InvalidRequest."""


class Accepted(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """From the engine: a call with a grammar is submitted; its grammar is usable."""

    request_id: str
    """The first request of the call."""


class Forgotten(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """From the engine to a peer that is not its client, or not any more: the engine has none of its requests.

    The client's own connection also delivers it when the connection is lost.
    """


class Stats(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """From the engine: the reply to AskStats."""

    key: int
    stats: EngineStats


class Steps(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """From the engine: the reply to AskSteps."""

    key: int
    services: dict[str, list[StepSample]]
    """Samples of the steps of each service."""


class ServiceChanged(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """From the engine: the reply to AddService, RemoveService, PinService: it is done, or has failed."""

    key: int
    services: dict[str, ServiceInfo]
    """All services now: the limits of the unchanged services may change as well."""
    weight_bytes: int
    """Size of all loaded weights."""
    error: str | None = None
    """Why the change failed; None: it is done."""


class WeightsMoved(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """From the engine: weights came to its memory or left it. A new client gets it if any are absent."""

    absent: tuple[AbsentWeights, ...]
    """All that are absent now."""


ServiceChange = AddService | RemoveService | PinService
ToEngine = Hello | Submit | Cancel | AskStats | AskSteps | ServiceChange | migration_wire.ToEngine
FromEngine = (
    Stepped
    | Transitions
    | Refused
    | Accepted
    | Forgotten
    | Stats
    | Steps
    | ServiceChanged
    | WeightsMoved
    | migration_wire.FromEngine
)

_encoder = msgspec.msgpack.Encoder()
_to_engine: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
_from_engine: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)


def encode(message: ToEngine | FromEngine) -> bytes:
    return _encoder.encode(message)


def decode_to_engine(frame: bytes) -> ToEngine:
    return _to_engine.decode(frame)


def decode_from_engine(frame: bytes) -> FromEngine:
    return _from_engine.decode(frame)
