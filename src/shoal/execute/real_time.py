"""RealTimeExecutor: sleeps as long for each plan as a latency model says, and computes nothing."""

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from shoal.core import Arrival, StepPlan, StepResult, StepTimings
from shoal.execute.fetch_link import FetchTimes
from shoal.execute.protocol import Interrupted, never
from shoal.execute.simulated import SimulatedExecutor, SimulatedModel
from shoal.execute.simulated_tokens import SimulatedTokens


class RealTimeExecutor:
    """Runs plans as a device beside the host: ``submit`` returns at once, ``collect`` sleeps until the end.

    models: step times, and the time to copy a block, by service. words: by service, the tokens that outputs
    are made of. fetch_times: as in SimulatedExecutor. clock: nanoseconds. sleep: takes seconds.
    """

    def __init__(
        self,
        models: Mapping[str, SimulatedModel],
        words: Mapping[str, Sequence[int]],
        fetch_times: FetchTimes | None = None,
        *,
        clock: Callable[[], int] = time.monotonic_ns,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._clock = clock
        self._sleep = sleep
        self._device = SimulatedExecutor(models, clock, _ignore_plan, fetch_times or FetchTimes())
        self._tokens = SimulatedTokens(words)
        self._interrupted: deque[Interrupted] = deque()
        """Of each plan in flight."""

    def add_service(self, service: str, model: SimulatedModel, words: Sequence[int]) -> None:
        """Add a service, between two plans."""
        self._device.add_service(service, model)
        self._tokens.add_service(service, words)

    def remove_service(self, service: str) -> None:
        """Remove a service without sequences, between two plans."""
        self._device.remove_service(service)
        self._tokens.remove_service(service)

    def submit(self, plan: StepPlan, interrupted: Interrupted = never) -> None:
        """See Executor; the plan begins now, or when those in flight have ended."""
        self._device.submit(plan)
        self._interrupted.append(interrupted)

    def collect(self) -> StepResult:
        plan, interrupted = self._device.plan, self._interrupted.popleft()
        self._tokens.apply(plan)
        ends_ns = self._device.iteration_ends_ns
        made: list[list[int]] = []
        while len(made) < len(ends_ns):
            tokens, ends = self._tokens.sample(plan)  # before the sleep, which hides the time for it
            self._sleep_until(ends_ns[len(made)])
            made.append(tokens)
            # One plan alone may have several iterations, so only then it matters what has come meanwhile.
            if len(made) < len(ends_ns) and (ends or interrupted() or self._weights_came()):
                self._device.end_after(len(made))
        result = self._device.collect()
        return replace(result, tokens=made, timings=StepTimings(forward_ns=result.duration_ns))

    def ready(self, seq_ids: Sequence[int]) -> Sequence[int]:
        """All of them, since no row is postponed."""
        return seq_ids

    def arrivals(self) -> Sequence[Arrival]:
        return self._device.arrivals()

    def read_blocks(self, service: str, blocks: Sequence[int]) -> memoryview:
        """Nothing, as simulated KV has no content; takes the time of the copy to the host."""
        self._copy(service, len(blocks))
        return self._device.read_blocks(service, blocks)

    def write_blocks(self, service: str, blocks: Sequence[int], content: memoryview) -> None:
        """Takes the time of the copy to the device; raises ValueError if ``content`` is not empty."""
        self._device.write_blocks(service, blocks, content)
        self._copy(service, len(blocks))

    def close(self) -> None:
        self._device.close()

    def _copy(self, service: str, blocks: int) -> None:
        self._sleep_until(self._clock() + round(self._device.models[service].copy_s * blocks * 1e9))

    def _weights_came(self) -> bool:
        return self._device.link.has_arrival(self._clock())

    def _sleep_until(self, end_ns: int) -> None:
        while (left_ns := end_ns - self._clock()) > 0:
            self._sleep(left_ns / 1e9)


def _ignore_plan(plan: StepPlan, start_ns: int, end_ns: int) -> None:
    """A plan is submitted."""
