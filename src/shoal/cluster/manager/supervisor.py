"""When engines are killed and started again."""

from collections.abc import Callable, Iterable

from shoal.cluster.manager.actions import KillEngine, StartEngine
from shoal.cluster.manager.state import Engine
from shoal.cluster.options import ClusterOptions
from shoal.cluster.status import EngineState
from shoal.engine.process.stall_tracker import BUSY_LOOP_FACTOR, StallTracker


class Supervisor:
    """Watches engines on a clock of its own, which stands while nobody ticks.

    Each tick moves that clock by the time since the last one, but at most by two intervals between ticks: so
    a process that could not hear engines for a while does not take their silence for death. Engines that use
    CPU time meanwhile are at work (see ``StallTracker``).
    """

    def __init__(self, options: ClusterOptions, starts_with: Callable[[Engine], tuple[str, ...]]) -> None:
        """starts_with: the services that an engine is to load at its start."""
        self._options = options
        self._starts_with = starts_with
        self._longest_ns = round(2 * options.tick_s * 1e9)
        self._last_ns: int | None = None

    def tick(self, engines: Iterable[Engine], now_ns: int) -> list[StartEngine | KillEngine]:
        """Kill those that hang, and start those whose wait is over."""
        since_ns = 0 if self._last_ns is None else max(0, min(now_ns - self._last_ns, self._longest_ns))
        self._last_ns = now_ns
        actions: list[StartEngine | KillEngine] = []
        for engine in engines:
            if engine.runs:
                engine.unseen_s += since_ns / 1e9
                if not engine.seen or engine.unseen_s > self._options.hung_after_s:
                    self._look(engine, 0.0)  # nobody tells what it uses
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
        engine.doing, engine.seen, engine.used_cpu_s, engine.read_bytes = "", False, 0.0, 0
        self._progress(engine)

    def heard(self, engine: Engine, hung: str = "") -> list[KillEngine]:
        """Notice a sign of life. hung: why its step counts as hung.

        While an engine loads, its imports may hold up its signs of life: then they mean nothing.
        """
        if engine.loaded:
            self._progress(engine)
        return [_kill(engine, hung)] if hung and not engine.killed else []

    def loading(self, engine: Engine, what: str) -> None:
        """Notice that an engine gets on with loading."""
        engine.doing = what
        if not engine.loaded:
            self._progress(engine)

    def worked(self, engine: Engine, cpu_s: float, read_bytes: int) -> None:
        """Notice what an engine's process has used since its start."""
        self._look(engine, max(0.0, cpu_s - engine.used_cpu_s))
        engine.seen, engine.used_cpu_s = True, max(engine.used_cpu_s, cpu_s)
        if read_bytes > engine.read_bytes:
            engine.read_bytes = read_bytes
            engine.work.mark()

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

    def _progress(self, engine: Engine) -> None:
        engine.work.progress()
        engine.unseen_s = 0.0

    def _look(self, engine: Engine, cpu_s: float) -> None:
        """Count the time since the last look, with the CPU time that was used meanwhile."""
        engine.work.observe(engine.unseen_s, cpu_s)
        engine.unseen_s = 0.0

    def _judge(self, engine: Engine) -> list[KillEngine]:
        """Kill an engine that is silent, or does not get on with loading, and hangs."""
        if engine.killed:
            return []
        if engine.loaded:
            why = _hangs(engine.work, "cluster.hung_after", self._options.hung_after_s)
            return [_kill(engine, f"it was silent, and {why}")] if why else []
        why = _hangs(engine.work, "cluster.load_timeout", self._options.load_timeout_s)
        doing = f" ({engine.doing})" if engine.doing else ""
        return [_kill(engine, f"it did not get on with loading{doing}, and {why}")] if why else []


def _hangs(work: StallTracker, key: str, limit_s: float) -> str:
    """What an engine used that hangs, in words; empty: it does not. key: of the limit."""
    if work.still_s > limit_s:
        return (
            f"used {work.still_cpu_s:.2f} s of CPU time in {work.still_s:.1f} s"
            f" (the limit, {key}, is {limit_s:g} s)"
        )
    most_s = BUSY_LOOP_FACTOR * limit_s
    if work.took_s > most_s and work.cpu_s > most_s:
        return (
            f"used {work.cpu_s:.0f} s of CPU time in {work.took_s:.0f} s"
            f" (the limit is {BUSY_LOOP_FACTOR:g} times {key}, {limit_s:g} s)"
        )
    return ""


def _kill(engine: Engine, why: str) -> KillEngine:
    engine.killed = True
    return KillEngine(engine.name, engine.incarnation, why)
