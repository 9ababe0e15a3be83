"""The heartbeat thread of an engine process, which also reports a hung step to the owner."""

import threading
import time
from contextlib import suppress

from shoal.engine.build import default_threads
from shoal.engine.process.config import EngineConfig
from shoal.engine.process.hang_detector import HangDetector, StepTimer
from shoal.engine.process.lifeline import Beat, Lifeline

# A late observation counts for at most this many heartbeat intervals, and this part of the limit: with little
# of a core, the process may not have run at all since the one before.
_MAX_INTERVALS = 2.0
_MAX_PART_OF_LIMIT = 1 / 3


def start_heartbeat(owner: Lifeline, config: EngineConfig) -> StepTimer:
    """Send heartbeats until the owner is gone; returns the timer that the engine reports its steps to."""
    threads = None if config.options.device != "cpu" else config.options.threads or default_threads()
    timer = StepTimer(time.monotonic_ns if threads is None else lambda: time.process_time_ns() // threads)
    max_s = min(_MAX_INTERVALS * config.heartbeat_s, _MAX_PART_OF_LIMIT * config.step_timeout_s)
    detector = HangDetector(config.step_timeout_s, threads, max_s)
    arguments = (owner, config.heartbeat_s, timer, detector)
    threading.Thread(target=_beat, args=arguments, name="heartbeat", daemon=True).start()
    return timer


def _beat(owner: Lifeline, every_s: float, timer: StepTimer, detector: HangDetector) -> None:
    observed_ns, used_ns = time.monotonic_ns(), _other_threads_cpu_ns()
    with suppress(ConnectionError):
        while True:
            now_ns, cpu_ns = time.monotonic_ns(), _other_threads_cpu_ns()
            since_s, cpu_s = (now_ns - observed_ns) / 1e9, max(0, cpu_ns - used_ns) / 1e9
            owner.send(Beat(detector.observe(timer.present, since_s, cpu_s)))
            observed_ns, used_ns = now_ns, cpu_ns
            time.sleep(every_s)


def _other_threads_cpu_ns() -> int:
    """CPU time of all threads but this one."""
    own_ns = time.thread_time_ns()
    return time.process_time_ns() - own_ns
