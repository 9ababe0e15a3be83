"""A node's messages, translated into backend events."""

from shoal.cluster.backends.interface import (
    BackendEvent,
    FoundEngine,
    Heartbeat,
    Loaded,
    Loading,
    ProcessUsage,
)
from shoal.cluster.node.engine_processes import EngineMessage, EngineUsage, RunningEngine
from shoal.engine.process import lifeline


def to_event(said: EngineMessage) -> BackendEvent | None:
    """The event of an engine's message; None: there is none."""
    engine, incarnation, pid = said.engine, said.incarnation, said.pid
    match said.message:
        case lifeline.Loading(what):
            return Loading(engine=engine, incarnation=incarnation, what=what)
        case lifeline.Ready() as ready:
            return _loaded(engine, incarnation, pid, ready)
        case lifeline.Beat(hung):
            return Heartbeat(engine=engine, incarnation=incarnation, pid=pid, hung=hung)
        case lifeline.Failed():
            return None


def found_engine(running: RunningEngine) -> FoundEngine:
    engine, incarnation, pid, ready = running.engine, running.incarnation, running.pid, running.ready
    loaded = None if ready is None else _loaded(engine, incarnation, pid, ready)
    return FoundEngine(engine=engine, incarnation=incarnation, pid=pid, loaded=loaded)


def to_usage(usage: EngineUsage) -> ProcessUsage:
    return ProcessUsage(
        engine=usage.engine,
        incarnation=usage.incarnation,
        cpu_s=usage.cpu_s,
        read_bytes=usage.read_bytes,
    )


def _loaded(engine: str, incarnation: int, pid: int, ready: lifeline.Ready) -> Loaded:
    return Loaded(
        engine=engine,
        incarnation=incarnation,
        pid=pid,
        endpoint=ready.endpoint,
        info=ready.info,
        transfer=ready.transfer,
    )
