"""What a node tells, as a backend's events."""

from shoal.cluster.backend import BackendEvent, Beat, FoundEngine, Loaded, Loading
from shoal.cluster.node.engines import EngineSaid, RunningEngine
from shoal.engine import lifeline


def to_event(said: EngineSaid) -> BackendEvent | None:
    """What an engine said; None: nothing that a backend hands on."""
    engine, incarnation, pid = said.engine, said.incarnation, said.pid
    match said.message:
        case lifeline.Loading(what):
            return Loading(engine=engine, incarnation=incarnation, what=what)
        case lifeline.Ready() as ready:
            return _loaded(engine, incarnation, pid, ready)
        case lifeline.Beat(overdue_s):
            return Beat(engine=engine, incarnation=incarnation, pid=pid, overdue_s=overdue_s)
        case lifeline.Failed():
            return None


def found_engine(running: RunningEngine) -> FoundEngine:
    """An engine that runs already."""
    engine, incarnation, pid, ready = running.engine, running.incarnation, running.pid, running.ready
    loaded = None if ready is None else _loaded(engine, incarnation, pid, ready)
    return FoundEngine(engine=engine, incarnation=incarnation, pid=pid, loaded=loaded)


def _loaded(engine: str, incarnation: int, pid: int, ready: lifeline.Ready) -> Loaded:
    return Loaded(
        engine=engine,
        incarnation=incarnation,
        pid=pid,
        endpoint=ready.endpoint,
        info=ready.info,
        transfer=ready.transfer,
    )
