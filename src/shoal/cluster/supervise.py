"""When engines are killed and started again."""

from collections.abc import Callable, Iterable

from shoal.cluster.actions import KillEngine, StartEngine
from shoal.cluster.options import ClusterOptions
from shoal.cluster.state import Engine
from shoal.cluster.status import EngineState


class Supervisor:
    """Watches engines on a clock of its own, which stands while nobody ticks.

    Each tick moves that clock by the time since the last one, but at most by two intervals between ticks: so
    a process that could not hear engines for a while does not take their silence for death.
    """

    def __init__(self, options: ClusterOptions, starts_with: Callable[[Engine], tuple[str, ...]]) -> None:
        """starts_with: the services that an engine is to load at its start."""
        self._options = options
        self._starts_with = starts_with
        self._longest_ns = round(2 * options.tick_s * 1e9)
        self._last_ns: int | None = None
        self._watched_ns = 0

    def tick(self, engines: Iterable[Engine], now_ns: int) -> list[StartEngine | KillEngine]:
        """Kill who is silent or loads for too long, and start whose wait is over."""
        if self._last_ns is not None:
            self._watched_ns += max(0, min(now_ns - self._last_ns, self._longest_ns))
        self._last_ns = now_ns
        actions: list[StartEngine | KillEngine] = []
        for engine in engines:
            if engine.runs:
                actions += self._judge(engine)
            elif engine.state is EngineState.WAITING and now_ns >= engine.restart_ns:
                engine.restarts += 1
                actions.append(self.start(engine, engine.incarnation + 1))
        return actions

    def start(self, engine: Engine, incarnation: int) -> StartEngine:
        """Start an engine that does not run."""
        if engine.state is EngineState.WAITING:
            engine.move(EngineState.LOADING)
        engine.incarnation = incarnation
        self.watch(engine)
        return StartEngine(engine.name, incarnation, self._starts_with(engine))

    def watch(self, engine: Engine) -> None:
        """The engine's process runs from now on."""
        engine.runs, engine.loaded, engine.killed = True, False, False
        engine.began_ns, engine.heard_ns = self._watched_ns, None

    def heard(self, engine: Engine, overdue_s: float = 0.0) -> list[KillEngine]:
        """Notice a sign of life. overdue_s: how long its step has taken too long."""
        engine.heard_ns = self._watched_ns
        if overdue_s <= 0 or engine.killed:
            return []
        return [_kill(engine, f"a step takes {overdue_s:.1f} s longer than any may")]

    def ended(self, engine: Engine, reason: str, now_ns: int) -> None:
        """Notice the end of an engine's process, and when it is to be started again."""
        restart = self._options.restart
        if engine.state is EngineState.READY and now_ns - engine.ready_ns >= restart.max_s * 1e9:
            engine.deaths = 0
        engine.deaths += 1
        engine.runs, engine.killed, engine.last_error = False, False, reason
        if engine.state is not EngineState.DRAINING:
            engine.move(EngineState.WAITING)
            engine.restart_ns = now_ns + round(restart.wait_s(engine.deaths) * 1e9)

    def _judge(self, engine: Engine) -> list[KillEngine]:
        """Kill an engine that is silent, or not ready, for too long.

        While an engine loads, its imports may hold up its heartbeats: then only the time of loading counts.
        """
        if engine.killed:
            return []
        silent_s = 0.0 if engine.heard_ns is None else (self._watched_ns - engine.heard_ns) / 1e9
        if engine.state is not EngineState.LOADING and silent_s > self._options.hung_after_s:
            return [_kill(engine, f"it was silent for {silent_s:.1f} s")]
        loads_s = (self._watched_ns - engine.began_ns) / 1e9
        if engine.state is EngineState.LOADING and loads_s > self._options.load_timeout_s:
            return [_kill(engine, f"it was not ready after {loads_s:.1f} s")]
        return []


def _kill(engine: Engine, why: str) -> KillEngine:
    engine.killed = True
    return KillEngine(engine.name, engine.incarnation, why)
