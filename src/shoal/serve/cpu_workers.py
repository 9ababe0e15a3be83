"""Worker processes for slow work on client input (large bodies, chat templates), with CPU and memory limits.

In the server's process, even in a thread, such work would delay every stream. The processes are those of
``anyio.to_process``: started when needed, reused, and ended with the server.
"""

import gc
import os
import resource
import signal
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Protocol, TypeVar

import psutil
from anyio import BrokenWorkerProcess, CapacityLimiter, to_process

from shoal.core import InvalidRequest
from shoal.engine.process.child_signals import interrupts_held_back

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class TaskLimits:
    """Limits of one task."""

    cpu_s: float = 2.0
    """CPU time rather than wall time, so that tasks do not fail on a busy machine."""
    memory_bytes: int = 128 * 2**20
    """On top of the memory of a new process."""


class Workers(Protocol):
    """Runs tasks on client input."""

    async def run(self, queue: str, task: str, function: Callable[..., Result], *arguments: object) -> Result:
        """``function(*arguments)``, after the earlier tasks in ``queue``.

        task: describes the task in the InvalidRequest that is raised if it exceeds the limits. Errors of the
        function are raised unchanged.
        """


class WorkerProcesses:
    """Runs picklable tasks in worker processes, one at a time in each queue.

    preload: a module that a process imports at its start, so that imports do not count toward task limits.
    """

    def __init__(self, limits: TaskLimits | None = None, *, preload: str = "") -> None:
        self._limits = limits or TaskLimits()
        self._preload = preload
        self._queues: defaultdict[str, CapacityLimiter] = defaultdict(lambda: CapacityLimiter(1))

    async def start(self) -> None:
        """Start a process, so that the first task need not wait a second for it."""
        with interrupts_held_back():
            await self.run("", "starting a process", bool)

    async def run(self, queue: str, task: str, function: Callable[..., Result], *arguments: object) -> Result:
        limits = self._limits
        try:
            return await to_process.run_sync(
                _run_limited,
                limits,
                self._preload,
                function,
                arguments,
                cancellable=True,
                limiter=self._queues[queue],
            )
        except BrokenWorkerProcess:
            allowed = f"{limits.cpu_s:g} seconds of CPU or {limits.memory_bytes / 2**20:g} MiB of memory"
            raise InvalidRequest(f"{task} takes more than {allowed}; send less") from None
        except RecursionError:
            raise InvalidRequest(f"{task} goes too deep; send less that is nested") from None


def _run_limited(
    limits: TaskLimits, preload: str, function: Callable[..., Result], arguments: tuple[object, ...]
) -> Result:
    _prepare_process(limits.memory_bytes, preload)
    # SIGPROF is not handled, so it ends the process whatever it does.
    signal.setitimer(signal.ITIMER_PROF, limits.cpu_s)
    gc.disable()  # its time grows with the square of the parsed size; most tasks leave no cycles
    try:
        return function(*arguments)
    except MemoryError:
        os._exit(1)  # the remaining memory may not be enough for the next task
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        gc.enable()


@cache
def _prepare_process(memory_bytes: int, preload: str) -> None:
    """Once in each process: import ``preload``, limit memory, and ignore Ctrl-C, which the server handles."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if preload:
        import_module(preload)
    limit = psutil.Process().memory_info().vms + memory_bytes
    with suppress(ValueError, OSError):  # not on every system
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
