"""What a node tells, as a backend's events."""

from shoal.cluster.backends.interface import BackendEvent, Beat, FoundEngine, Loaded, Loading, Worked
from shoal.cluster.node.engine_processes import EngineSaid, EngineUsage, RunningEngine
from shoal.engine.process import lifeline


def to_event(said: EngineSaid) -> BackendEvent | None:
    """What an engine said; None: nothing that a backend hands on."""
    engine, incarnation, pid = said.engine, said.incarnation, said.pid
    match said.message:
        case lifeline.Loading(what):
            return Loading(engine=engine, incarnation=incarnation, what=what)
        case lifeline.Ready() as ready:
            return _loaded(engine, incarnation, pid, ready)
        case lifeline.Beat(hung):
            return Beat(engine=engine, incarnation=incarnation, pid=pid, hung=hung)
        case lifeline.Failed():
            return None


def found_engine(running: RunningEngine) -> FoundEngine:
    """An engine that runs already."""
    engine, incarnation, pid, ready = running.engine, running.incarnation, running.pid, running.ready
    loaded = None if ready is None else _loaded(engine, incarnation, pid, ready)
    return FoundEngine(engine=engine, incarnation=incarnation, pid=pid, loaded=loaded)


def worked(usage: EngineUsage) -> Worked:
    """What an engine has used."""
    return Worked(
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
