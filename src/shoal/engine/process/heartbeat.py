"""The thread of an engine's process that gives signs of life, whatever the engine does."""

import threading
import time
from contextlib import suppress

from shoal.engine.build import default_threads
from shoal.engine.process.config import EngineConfig
from shoal.engine.process.hang_detector import HangDetector, StepTimer
from shoal.engine.process.lifeline import Beat, Lifeline

# A look at the present step counts for at most so many times the time between two, and for such a part of the
# limit: in a single one a process that gets little of a core may not have had its turn.
_LATE_LOOK = 2.0
_PART_OF_LIMIT = 1 / 3


def start_heartbeat(owner: Lifeline, config: EngineConfig) -> StepTimer:
    """Give signs of life from now on, until the owner is gone; returns what is to be told of steps."""
    threads = None if config.options.device != "cpu" else config.options.threads or default_threads()
    watch = StepTimer(time.monotonic_ns if threads is None else lambda: time.process_time_ns() // threads)
    most_s = min(_LATE_LOOK * config.heartbeat_s, _PART_OF_LIMIT * config.step_timeout_s)
    judge = HangDetector(config.step_timeout_s, threads, most_s)
    arguments = (owner, config.heartbeat_s, watch, judge)
    threading.Thread(target=_beat, args=arguments, name="heartbeat", daemon=True).start()
    return watch


def _beat(owner: Lifeline, every_s: float, watch: StepTimer, judge: HangDetector) -> None:
    looked_ns, used_ns = time.monotonic_ns(), _used_ns()
    with suppress(ConnectionError):
        while True:
            now_ns, cpu_ns = time.monotonic_ns(), _used_ns()
            since_s, cpu_s = (now_ns - looked_ns) / 1e9, max(0, cpu_ns - used_ns) / 1e9
            owner.send(Beat(judge.look(watch.present, since_s, cpu_s)))
            looked_ns, used_ns = now_ns, cpu_ns
            time.sleep(every_s)


def _used_ns() -> int:
    """CPU time of all threads but the one that asks."""
    own_ns = time.thread_time_ns()
    return time.process_time_ns() - own_ns
