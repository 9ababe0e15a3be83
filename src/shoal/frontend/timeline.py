"""Timeline: the phases of one request, on all of its engines."""

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple


class Phase(StrEnum):
    """What a request does."""

    WAITING = "waiting"
    """It has no engine, or its engine has not admitted it: it waits for memory, weights or its turn."""
    PREFILL = "prefill"
    """It runs, and computes its prompt, or again what it lost, up to the next token."""
    DECODE = "decode"
    """It runs and has a token in this run."""
    PREEMPTED = "preempted"
    """It ran and has lost its place in the KV pool; it waits for memory."""


class PhaseBegin(NamedTuple):
    """A phase that lasts until the next one begins."""

    begin_ns: int
    phase: Phase
    engine: str | None
    """None: no engine has the request."""


@dataclass(slots=True)
class Timeline:
    """The phases of one request, in order; a migration with KV begins a phase on another engine."""

    phases: list[PhaseBegin]

    @classmethod
    def from_arrival(cls, arrival_ns: int) -> "Timeline":
        return cls([PhaseBegin(arrival_ns, Phase.WAITING, None)])

    @property
    def phase(self) -> Phase:
        """The present phase."""
        return self.phases[-1].phase

    def begin(self, phase: Phase, engine: str | None, at_ns: int) -> None:
        """Begin a phase, not before the last one began; without effect if the request is in it already."""
        last = self.phases[-1]
        if (phase, engine) != last[1:]:
            self.phases.append(PhaseBegin(max(at_ns, last.begin_ns), phase, engine))


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestStatus:
    """One choice of a call, as ``/metrics`` counts requests."""

    id: str
    name: str | None
    """The client's name of its HTTP request."""
    service: str
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    phases: tuple[PhaseBegin, ...]
    ended_ns: int | None = None
    """None: it is unfinished."""
    finish: str | None = None
    """A ``FinishReason``; None: it is unfinished."""

    @property
    def engine(self) -> str | None:
        """Its engine, or the last one that it had."""
        return next((begin.engine for begin in reversed(self.phases) if begin.engine is not None), None)


class RequestTable(NamedTuple):
    """Requests of all engines."""

    unfinished: list[RequestStatus]
    """The oldest first."""
    ended: list[RequestStatus]
    """The last that ended, the latest last."""
    left_out: int
    """Unfinished requests that are not in the table."""
