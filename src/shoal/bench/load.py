"""Open and closed loop: sends calls at their times, or each when another one has ended."""

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from shoal.bench.target import Answer, Call, Target
from shoal.core import percentile

_TICK_S = 0.02
_LATE_S = 0.02
"""A client whose own delays exceed this measures itself."""
_BUSY = 0.9


@dataclass(slots=True)
class ClientState:
    """What the client did besides waiting, to tell its own delays from those of the server."""

    delays_s: list[float] = field(default_factory=list)
    """How late a timer was, sampled during the run: as late are time stamps of chunks."""
    sent_late_s: float = 0.0
    """Longest time after its own at which a call was sent."""
    cpu_share: float = 0.0
    """CPU time of the process over the duration of the run."""

    @property
    def delay_p99_s(self) -> float:
        return percentile(self.delays_s, 99) if self.delays_s else 0.0

    @property
    def saturated(self) -> bool:
        """Whether figures contain delays of the client."""
        return self.delay_p99_s > _LATE_S or self.cpu_share > _BUSY


@dataclass(slots=True)
class LoadRun:
    """Calls under way and ended."""

    answers: list[Answer] = field(default_factory=list)
    """Of all calls that were sent, in this order."""
    client: ClientState = field(default_factory=ClientState)
    begin_ns: int = 0
    end_ns: int = 0
    ended: int = 0

    @property
    def running(self) -> int:
        return len(self.answers) - self.ended


async def run_load(
    target: Target,
    calls: Sequence[Call],
    run: LoadRun,
    clients: int | None = None,
    on_change: Callable[[LoadRun], None] = lambda run: None,
) -> None:
    """Send all calls, wait for their answers, and note them in ``run``, which is new.

    clients: number of calls under way at once (closed loop); None: each at its time (open loop). on_change:
    called now and then. If the task is cancelled, so are the calls.
    """
    run.begin_ns = time.monotonic_ns()
    cpu_s = time.process_time()
    ticker = asyncio.create_task(_tick(run, on_change))
    try:
        await (_open(target, calls, run) if clients is None else _closed(target, calls, clients, run))
    finally:
        ticker.cancel()
        run.end_ns = time.monotonic_ns()
        run.client.cpu_share = (time.process_time() - cpu_s) / max(1e-9, (run.end_ns - run.begin_ns) / 1e9)
        on_change(run)


async def _tick(run: LoadRun, on_change: Callable[[LoadRun], None]) -> None:
    while True:
        before = time.monotonic()
        await asyncio.sleep(_TICK_S)
        run.client.delays_s.append(time.monotonic() - before - _TICK_S)
        on_change(run)


async def _open(target: Target, calls: Sequence[Call], run: LoadRun) -> None:
    async with asyncio.TaskGroup() as group:
        for call in sorted(calls, key=lambda call: call.arrival_ns):
            due_ns = run.begin_ns + call.arrival_ns
            if (wait_ns := due_ns - time.monotonic_ns()) > 0:
                await asyncio.sleep(wait_ns / 1e9)
            group.create_task(_send(target, call, run))
            run.client.sent_late_s = max(run.client.sent_late_s, (time.monotonic_ns() - due_ns) / 1e9)


async def _closed(target: Target, calls: Sequence[Call], clients: int, run: LoadRun) -> None:
    left = iter(calls)

    async def client() -> None:
        for call in left:
            await _send(target, call, run)

    async with asyncio.TaskGroup() as group:
        for _ in range(min(clients, len(calls))):
            group.create_task(client())


async def _send(target: Target, call: Call, run: LoadRun) -> None:
    answer = Answer(call)
    run.answers.append(answer)
    try:
        await target.send(answer)
    finally:
        run.ended += 1


@contextmanager
def many_open_files() -> Iterator[None]:
    """Allow as many connections as the system lets this process have."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
