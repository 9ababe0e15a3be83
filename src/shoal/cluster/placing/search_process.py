"""Runs a search in a process of its own at low priority, so that neither the event loop nor engines wait."""

import asyncio
import os
import pickle
import struct
import sys

from shoal.cluster.placing.search_task import SearchResult, SearchTask
from shoal.core import ShoalError
from shoal.engine.process.child_signals import interrupts_held_back, kill_child

WORKER = "shoal.simulate.live_search_worker"
"""The module that is run: it reads a task from its standard input, and writes the result to its output."""
HEADER = struct.Struct("<Q")
"""The length of a task in bytes, before it."""
_MARGIN_S = 30.0
"""A process that takes this much longer than the search may is killed."""


class SearchFailed(ShoalError):
    """The process of a search ended without a result."""


class SearchProcess:
    """A ``Searcher``. worker: module that is run."""

    def __init__(self, worker: str = WORKER) -> None:
        self._worker = worker

    async def __call__(self, task: SearchTask) -> SearchResult:
        """The result of a search; the process ends with it, and if this is cancelled. Raises SearchFailed."""
        with interrupts_held_back():
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                self._worker,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                env=os.environ
                | {
                    "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
                    # Engines need the cores.
                    "OMP_NUM_THREADS": "1",
                    "OPENBLAS_NUM_THREADS": "1",
                },
            )
        try:
            answer = await asyncio.wait_for(_exchange(process, task), task.limit_s + _MARGIN_S)
        except TimeoutError:
            raise SearchFailed(f"it has not ended {_MARGIN_S:g} s after its time") from None
        finally:
            kill_child(process)
            await process.wait()
        result = pickle.loads(answer) if answer else None
        if isinstance(result, SearchResult):
            return result
        raise SearchFailed(result if isinstance(result, str) else "its process ended; see the log")


async def _exchange(process: asyncio.subprocess.Process, task: SearchTask) -> bytes:
    """Send the task and return what comes back; the input stays open, since its end ends the process."""
    assert process.stdin is not None
    assert process.stdout is not None
    message = pickle.dumps(task)
    try:
        process.stdin.write(HEADER.pack(len(message)) + message)
        await process.stdin.drain()
    except ConnectionError:
        return b""
    return await process.stdout.read()
