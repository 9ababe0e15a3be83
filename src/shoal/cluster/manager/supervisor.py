"""Supervision of engine processes: killing hung engines and restarting dead ones."""

from collections.abc import Callable, Iterable

from shoal.cluster.manager.actions import KillEngine, StartEngine
from shoal.cluster.manager.state import Engine
from shoal.cluster.options import ClusterOptions
from shoal.cluster.status import EngineState
from shoal.engine.process.stall_tracker import BUSY_LOOP_FACTOR, StallTracker


class Supervisor:
    """Watches engines on a clock of its own, which advances with ticks.

    A tick advances that clock by the time since the last tick, at most by two tick intervals. So the
    supervisor does not mistake a pause of its own process for silence of the engines. Engines that use CPU
    time count as working (see ``StallTracker``).
    """

    def __init__(
        self, options: ClusterOptions, services_to_load: Callable[[Engine], tuple[str, ...]]
    ) -> None:
        """services_to_load: gives the services that an engine loads at its start."""
        self._options = options
        self._services_to_load = services_to_load
        self._max_step_ns = round(2 * options.tick_s * 1e9)
        self._last_ns: int | None = None

    def tick(self, engines: Iterable[Engine], now_ns: int) -> list[StartEngine | KillEngine]:
        """Kill hung engines, and restart those whose wait is over and that have services."""
        since_ns = 0 if self._last_ns is None else max(0, min(now_ns - self._last_ns, self._max_step_ns))
        self._last_ns = now_ns
        actions: list[StartEngine | KillEngine] = []
        for engine in engines:
            if engine.runs:
                engine.uncounted_s += since_ns / 1e9
                if not engine.usage_known or engine.uncounted_s > self._options.hung_after_s:
                    self._count_time(engine, 0.0)  # its usage is not reported
                actions += self._check_hung(engine)
            elif engine.state is EngineState.WAITING and now_ns >= engine.restart_ns and engine.residences:
                engine.restarts += not engine.stopping
                actions.append(self.start(engine, engine.incarnation + 1))
        return actions

    def start(self, engine: Engine, incarnation: int) -> StartEngine:
        if engine.state in (EngineState.WAITING, EngineState.STANDBY):
            engine.transition_to(EngineState.LOADING)
        engine.incarnation = incarnation
        self.watch(engine)
        return StartEngine(engine.name, incarnation, self._services_to_load(engine))

    def watch(self, engine: Engine) -> None:
        """Supervise an engine whose process has started."""
        engine.runs, engine.loaded, engine.killed, engine.stopping = True, False, False, False
        engine.doing, engine.usage_known, engine.used_cpu_s, engine.read_bytes = "", False, 0.0, 0
        self._progress(engine)

    def heartbeat(self, engine: Engine, hung: str = "") -> list[KillEngine]:
        """A heartbeat came. hung: why its step counts as hung.

        Heartbeats of a loading engine are ignored, since imports may delay them.
        """
        if engine.loaded:
            self._progress(engine)
        return [_kill(engine, hung)] if hung and not engine.killed else []

    def loading_progress(self, engine: Engine, what: str) -> None:
        """A loading engine made progress."""
        engine.doing = what
        if not engine.loaded:
            self._progress(engine)

    def usage(self, engine: Engine, cpu_s: float, read_bytes: int) -> None:
        """Resource usage of an engine's process since its start was reported."""
        self._count_time(engine, max(0.0, cpu_s - engine.used_cpu_s))
        engine.usage_known, engine.used_cpu_s = True, max(engine.used_cpu_s, cpu_s)
        if read_bytes != engine.read_bytes:  # fewer once a child that has read has ended
            engine.read_bytes = read_bytes
            engine.work.mark()

    def engine_ended(self, engine: Engine, reason: str, now_ns: int) -> None:
        """An engine's process ended: schedule its restart, unless it goes to standby."""
        if engine.deactivating or engine.stopping:
            engine.runs = engine.killed = False
            engine.deaths = 0
            if engine.deactivating:
                engine.deactivating = False
                engine.transition_to(EngineState.STANDBY)
            elif engine.state is not EngineState.DRAINING:
                engine.transition_to(EngineState.WAITING)
                engine.restart_ns = now_ns
            return
        restart = self._options.restart
        if engine.state is EngineState.READY and now_ns - engine.ready_ns >= restart.max_s * 1e9:
            engine.deaths = 0
        engine.deaths += 1
        engine.runs, engine.killed, engine.last_error = False, False, reason
        if engine.state is not EngineState.DRAINING:
            engine.transition_to(EngineState.WAITING)
            engine.restart_ns = now_ns + round(restart.wait_s(engine.deaths) * 1e9)

    def _progress(self, engine: Engine) -> None:
        engine.work.progress()
        engine.uncounted_s = 0.0

    def _count_time(self, engine: Engine, cpu_s: float) -> None:
        """Count the time since the last call, with the CPU time used in it."""
        engine.work.observe(engine.uncounted_s, cpu_s)
        engine.uncounted_s = 0.0

    def _check_hung(self, engine: Engine) -> list[KillEngine]:
        """Kill an engine that hangs: silent, or loading without progress."""
        if engine.killed:
            return []
        if engine.loaded:
            why = _describe_hang(engine.work, "cluster.hung_after", self._options.hung_after_s)
            return [_kill(engine, f"it was silent, and {why}")] if why else []
        why = _describe_hang(engine.work, "cluster.load_timeout", self._options.load_timeout_s)
        doing = f" ({engine.doing})" if engine.doing else ""
        return [_kill(engine, f"it did not get on with loading{doing}, and {why}")] if why else []


def _describe_hang(work: StallTracker, key: str, limit_s: float) -> str:
    """Why an engine counts as hung, in words; empty: it does not. key: option of the limit."""
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
