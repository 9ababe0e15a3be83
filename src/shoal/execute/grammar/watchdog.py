"""Watchdog of a grammar process: detects stalls and excessive use, both measured in CPU time."""

import os
import time
from contextlib import suppress

from shoal.execute.grammar.messages import LOWEST_PRIORITY

STALLED_S = 5.0
"""A process that uses no CPU for this long while it should work is stopped, or swapped out."""
SLOW_SHARE = 0.15
"""A process that has used more than this share of its CPU time gets the lowest priority for good."""


class ProcessStalled(OSError):
    """A process uses no CPU time."""


class CpuTimeExceeded(Exception):
    """A process has used more CPU time than it may."""


class Watchdog:
    """Checks a process while another waits for it.

    cpu_s: CPU time that it may use from now on; None if that is limited elsewhere.
    """

    def __init__(self, pid: int, cpu_s: float | None = None) -> None:
        self._pid = pid
        self._limit_ns = None if cpu_s is None else round(cpu_s * 1e9)
        self._begun_ns = self._seen_ns = _cpu_ns(pid)
        self._moved = time.monotonic()

    @property
    def used_s(self) -> float:
        """CPU time that it had used at the last check."""
        return (self._seen_ns - self._begun_ns) / 1e9

    def check(self) -> None:
        """Raise ProcessStalled or CpuTimeExceeded if either is true."""
        seen_ns, now = _cpu_ns(self._pid), time.monotonic()
        if seen_ns > self._seen_ns:
            self._seen_ns, self._moved = seen_ns, now
        elif now - self._moved > STALLED_S:
            raise ProcessStalled(f"process {self._pid} has used no CPU for {STALLED_S:g} s")
        if self._limit_ns is None:
            return
        used_ns = seen_ns - self._begun_ns
        if used_ns > SLOW_SHARE * self._limit_ns:
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, self._pid, LOWEST_PRIORITY)
        if used_ns > self._limit_ns:
            raise CpuTimeExceeded


def _cpu_ns(pid: int) -> int:
    """CPU time that a process has used; 0 if it has ended or the system does not report it."""
    try:
        with open(f"/proc/{pid}/schedstat", encoding="ascii") as file:
            return int(file.read().split()[0])
    except OSError:
        return 0
