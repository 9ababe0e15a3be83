"""Timeline: the phases of one request, on all of its engines."""

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from shoal.core import FinishReason

MAX_PHASES = 60
"""Of one request: it may be preempted thousands of times, and all of its phases are shown every second."""


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
    EARLIER = "earlier"
    """Several phases that are no longer kept apart."""


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
    """At most ``MAX_PHASES``: the first, then perhaps ``EARLIER``, then the latest."""
    ended_ns: int | None = None
    """None: the request is unfinished."""
    finish: FinishReason | None = None
    """How it ended."""
    why: str = ""
    """Why it was refused or failed."""

    @classmethod
    def from_arrival(cls, arrival_ns: int) -> "Timeline":
        return cls([PhaseBegin(arrival_ns, Phase.WAITING, None)])

    def end(self, finish: FinishReason, at_ns: int, why: str = "") -> None:
        """The request has ended."""
        self.why = why
        self.finish, self.ended_ns = finish, max(at_ns, self.phases[-1].begin_ns)

    @property
    def phase(self) -> Phase:
        """The present phase."""
        return self.phases[-1].phase

    def begin(self, phase: Phase, engine: str | None, at_ns: int) -> None:
        """Begin a phase, not before the last one began.

        Without effect if the request is in it already, or has ended.
        """
        last = self.phases[-1]
        if self.ended_ns is None and (phase, engine) != last[1:]:
            self.phases.append(PhaseBegin(max(at_ns, last.begin_ns), phase, engine))
            if len(self.phases) > MAX_PHASES:
                first, second = self.phases[1:3]
                self.phases[1:3] = [PhaseBegin(first.begin_ns, Phase.EARLIER, second.engine)]
