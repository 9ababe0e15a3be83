"""Engines that leave service and come back: drained, undrained, on standby, activated again."""

from collections.abc import Mapping

from shoal.cluster.manager.actions import StartEngine, StopEngine
from shoal.cluster.manager.residency import served_elsewhere
from shoal.cluster.manager.state import Engine
from shoal.cluster.manager.supervisor import Supervisor
from shoal.cluster.status import EngineState


class Activation:
    """Changes which engines are to take requests; methods return actions.

    engines: all, by name. An engine that goes to standby drains first, and its process ends once it has no
    requests and keeps no KV for migrating ones.
    """

    def __init__(self, engines: Mapping[str, Engine], supervisor: Supervisor) -> None:
        self._engines = engines
        self._supervisor = supervisor

    def drain(self, name: str) -> None:
        """An engine gets no more requests, also if it is on standby or goes there."""
        engine = self._engines.get(name)
        if engine is None:
            return
        engine.deactivating = False
        if engine.state is not EngineState.DRAINING:
            engine.transition_to(EngineState.DRAINING)

    def undrain(self, name: str, now_ns: int) -> None:
        engine = self._engines.get(name)
        if engine is not None and engine.state is EngineState.DRAINING:
            self._undrain(engine, now_ns)

    def activate(self, name: str, now_ns: int) -> list[StartEngine]:
        """Start an engine on standby, or undrain one that goes there. One without services stays."""
        engine = self._engines.get(name)
        if engine is not None and engine.state is EngineState.STANDBY and engine.residences:
            return [self._supervisor.start(engine, engine.incarnation + 1)]
        if engine is not None and engine.deactivating:
            self._undrain(engine, now_ns)
        return []

    def deactivate(self, name: str) -> None:
        """Let an engine go to standby, unless it is the only active one of a service."""
        engine = self._engines.get(name)
        if engine is None or not self.may_leave(engine):
            return
        if engine.runs:
            if engine.active:
                engine.transition_to(EngineState.DRAINING)
            engine.deactivating = True
        else:
            engine.transition_to(EngineState.STANDBY)

    def may_leave(self, engine: Engine) -> bool:
        """Whether an engine may go to standby: others are active for each of its services."""
        if engine.state is EngineState.STANDBY or engine.deactivating:
            return False
        others = self._engines.values()
        placed = [service for service in engine.residences if engine.places(service)]
        return all(served_elsewhere(service, engine, others) for service in placed)

    def stop_drained(self) -> list[StopEngine]:
        """End the processes of engines that go to standby and are idle."""
        actions = []
        for engine in self._engines.values():
            if engine.deactivating and engine.alive and engine.idle:
                engine.killed = engine.stopping = True
                actions.append(StopEngine(engine.name, engine.incarnation))
        return actions

    def _undrain(self, engine: Engine, now_ns: int) -> None:
        engine.deactivating = False
        if engine.runs:
            engine.transition_to(EngineState.READY if engine.loaded else EngineState.LOADING)
        else:
            engine.transition_to(EngineState.WAITING)
            engine.restart_ns = now_ns
