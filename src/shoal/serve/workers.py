"""Work on what clients send, in processes of its own: whatever it needs, the server goes on.

A large body that is parsed, or a model's chat template that is carried out, would hold up every
stream if it ran in the server's own process, in a thread too. The processes are those of
``anyio.to_process``; they are made when needed, kept, and end with the server.
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
from typing import Protocol, TypeVar

import psutil
from anyio import BrokenWorkerProcess, CapacityLimiter, to_process

from shoal.core import InvalidRequest
from shoal.engine.children import interrupts_held_back

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class WorkLimits:
    """What one piece of work may take."""

    cpu_s: float = 2.0
    """Processor time; a busy machine does not make work fail."""
    memory_bytes: int = 128 * 2**20
    """Beyond what its process has at its start."""


class Workers(Protocol):
    """Carries out work on what clients send."""

    async def run(self, line: str, what: str, function: Callable[..., Result], *arguments: object) -> Result:
        """``function(*arguments)``, after what was asked for earlier in the same ``line``.

        what: names the work in the InvalidRequest that is raised where it goes beyond the limits.
        Errors of the function are raised as they are.
        """


class WorkerProcesses:
    """Work in other processes, one at a time for each line; functions and arguments must be picklable."""

    def __init__(self, limits: WorkLimits | None = None) -> None:
        self._limits = limits or WorkLimits()
        self._lines: defaultdict[str, CapacityLimiter] = defaultdict(lambda: CapacityLimiter(1))

    async def start(self) -> None:
        """Have a process at hand; without this the first piece of work waits a second for it."""
        with interrupts_held_back():
            await self.run("", "starting a process", bool)

    async def run(self, line: str, what: str, function: Callable[..., Result], *arguments: object) -> Result:
        """As ``Workers`` has it."""
        limits = self._limits
        try:
            return await to_process.run_sync(
                _limited, limits, function, arguments, cancellable=True, limiter=self._lines[line]
            )
        except BrokenWorkerProcess:
            most = f"{limits.cpu_s:g} seconds of CPU or {limits.memory_bytes / 2**20:g} MiB of memory"
            raise InvalidRequest(f"{what} takes more than {most}; send less") from None
        except RecursionError:
            raise InvalidRequest(f"{what} goes too deep; send less that is nested") from None


def _limited(limits: WorkLimits, function: Callable[..., Result], arguments: tuple[object, ...]) -> Result:
    _prepare(limits.memory_bytes)
    # Nothing catches this alarm, so it ends the process wherever it is, and with nobody to wait for it.
    signal.setitimer(signal.ITIMER_PROF, limits.cpu_s)
    gc.disable()  # whose time grows with the square of what is parsed; most work leaves no cycles
    try:
        return function(*arguments)
    except MemoryError:
        os._exit(1)  # what is left of the memory may not do for the next piece of work
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        gc.enable()


@cache
def _prepare(memory_bytes: int) -> None:
    """Once in each process: bound its memory; Ctrl-C in a terminal reaches it too, but is the server's."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    limit = psutil.Process().memory_info().vms + memory_bytes
    with suppress(ValueError, OSError):  # not every system can
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
