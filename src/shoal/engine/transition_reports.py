"""TransitionReports: tells an engine's client which requests were admitted or preempted."""

from collections.abc import Callable

from shoal.engine import wire
from shoal.engine.core import Engine


class TransitionReports:
    """Reports of an engine to its client."""

    def __init__(self, engine: Engine, send: Callable[[wire.FromEngine], None]) -> None:
        self._engine = engine
        self._send = send
        self._unsent: list[tuple[str, bool, int]] = []  # (request id, whether it runs now, since when)
        engine.observe_transitions(self._note)

    def send(self) -> None:
        """Report what happened since the last call, before the tokens of these requests are sent."""
        if self._unsent:
            now_ns = self._engine.now_ns()
            transitions = [wire.Transition(id, runs, now_ns - at_ns) for id, runs, at_ns in self._unsent]
            self._unsent = []
            self._send(wire.Transitions(transitions))

    def _note(self, request_id: str, runs: bool) -> None:
        self._unsent.append((request_id, runs, self._engine.now_ns()))
