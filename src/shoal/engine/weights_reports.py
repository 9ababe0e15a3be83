"""WeightsReports: tells an engine's client which weights are absent, whenever that changes."""

from collections.abc import Callable

from shoal.engine import wire
from shoal.engine.absent_weights import AbsentWeights
from shoal.engine.core import Engine


class WeightsReports:
    """Reports of an engine to its client."""

    def __init__(self, engine: Engine, send: Callable[[wire.FromEngine], None]) -> None:
        self._engine = engine
        self._send = send
        self._changes = -1
        self._sent: tuple[AbsentWeights, ...] = ()

    def restart(self) -> None:
        """Another client came, which assumes that all weights are in memory."""
        self._changes, self._sent = -1, ()

    def send(self) -> None:
        """Report, if the client has an older state."""
        if self._changes == self._engine.weights_changes:
            return
        self._changes = self._engine.weights_changes
        absent = self._engine.absent_weights
        if absent != self._sent:
            self._sent = absent
            self._send(wire.WeightsMoved(absent))
