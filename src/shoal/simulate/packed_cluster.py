"""A light simulation of a packer: growing requests on many engines, epoch by epoch, without a scheduler.

An engine is its memory in tokens and a step time that is linear in the KV read. Hundreds of thousands of
requests take minutes.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from shoal.cluster.packing import Arrival, Growth, Operations, Packer
from shoal.core import ConfigError


@dataclass(frozen=True, slots=True)
class GrowingRequest:
    """A request with known lengths."""

    id: str
    arrival_s: float
    prompt_tokens: int
    """KV after its prefill."""
    output_tokens: int
    """One per decode step."""
    service: str = "default"


@dataclass(frozen=True, slots=True)
class EngineSpeed:
    """Step times of an engine."""

    step_s: float
    """Decode step, without reading KV."""
    context_token_s: float
    """Reading one token's KV in a step."""
    prefill_token_s: float
    """Computing a prompt token, or recomputing a token."""

    def alone_s(self, request: GrowingRequest) -> float:
        """Latency of a request alone on the engine."""
        context = request.prompt_tokens + request.output_tokens / 2
        return self.prefill_token_s * request.prompt_tokens + request.output_tokens * (
            self.step_s + self.context_token_s * context
        )


Expected = Callable[[GrowingRequest, int], int]
"""Expected output length of a request, given its generated tokens."""


@dataclass(slots=True)
class _Running:
    request: GrowingRequest
    generated: int = 0
    """Generated tokens, the coming epoch included."""
    ready_s: float = 0.0
    """End of its prefill."""
    group: str = ""


@dataclass(slots=True)
class PackedRun:
    """Results; lists have an entry per epoch."""

    epoch_s: float
    active: list[int]
    fewest: list[int]
    """Lower bound of groups for the requests."""
    used: list[int]
    """KV tokens."""
    capacity: list[int]
    """KV tokens that the active groups can hold."""
    migrations: list[int]
    latencies: list[float]
    """Of finished requests: end-to-end latency over the latency alone."""
    requests: int = 0
    preemptions: int = 0

    @property
    def finished(self) -> int:
        """Finished requests, without lost ones."""
        return len(self.latencies)


class PackedCluster:
    """Engines that step on their own, and a packer that runs at the beginning of every epoch.

    The packer gets the sizes at the end of the coming epoch, so that memory suffices until the next one.
    expected: expected lengths for the packer. batched: whether the operations of an epoch are applied
    together. waits: whether requests without room, and preempted ones, wait before later ones; else they are
    lost. A migration takes no time; a preempted request keeps the tokens of the epoch that begins.
    """

    def __init__(
        self,
        packer: Packer,
        speed: EngineSpeed,
        *,
        epoch_s: float = 1.0,
        expected: Expected,
        batched: bool = True,
        waits: bool = True,
    ) -> None:
        self.packer, self.speed, self.epoch_s = packer, speed, epoch_s
        self._expected = expected
        self._batched, self._waits = batched, waits
        self._running: dict[str, _Running] = {}
        self._waiting: list[_Running] = []
        self._credit: dict[str, float] = {}
        self._run = PackedRun(epoch_s, [], [], [], [], [], [])

    def run(self, requests: Sequence[GrowingRequest]) -> PackedRun:
        """Serve requests, sorted by arrival. Raises ConfigError for one that fits in no empty group."""
        most = max(one.group.capacity for one in self.packer.packing.groups.values())
        for request in requests:
            if request.prompt_tokens + request.output_tokens > most:
                raise ConfigError(f"request {request.id} is longer than any group's {most} tokens")
        self._run.requests = len(requests)
        come, epoch = 0, 0
        while come < len(requests) or self._running or self._waiting:
            now_s = epoch * self.epoch_s
            while come < len(requests) and requests[come].arrival_s <= now_s:
                self._waiting.append(_Running(requests[come]))
                come += 1
            self._epoch(now_s)
            epoch += 1
        return self._run

    def _epoch(self, now_s: float) -> None:
        departures = self._done()
        updates = self._grow(now_s, set(departures))
        arrivals = [self._arrival(one) for one in self._waiting]
        operations = Operations(departures=departures, updates=updates, arrivals=arrivals)
        waiting = {one.request.id: one for one in self._waiting}
        self._waiting = []
        lost: list[_Running] = []
        migrations = 0
        for each in [operations] if self._batched else operations.apart():
            if any(id not in self._running for id in (*each.departures, *each.updates)):
                continue  # preempted by an operation before it
            self._end(each.departures, now_s)
            changes = self.packer.apply(each)
            for id, group in changes.placed.items():
                self._start(waiting[id], group, now_s)
            for migration in changes.migrations:
                self._running[migration.id].group = migration.target
            migrations += len(changes.migrations)
            lost += [self._running.pop(id) for id in changes.preempted]
            self._run.preemptions += len(changes.preempted)
            lost += [waiting[id] for id in changes.refused]
        if self._waits:
            self._waiting = sorted(lost, key=lambda one: one.request.arrival_s)
        self._note(migrations)

    def _done(self) -> list[str]:
        """Requests that generated their last token in the past epoch."""
        return [id for id, one in self._running.items() if one.generated >= one.request.output_tokens]

    def _end(self, ids: Sequence[str], now_s: float) -> None:
        for id in ids:
            request = self._running.pop(id).request
            self._run.latencies.append((now_s - request.arrival_s) / self.speed.alone_s(request))

    def _grow(self, now_s: float, done: Collection[str]) -> dict[str, Growth]:
        """Grow unfinished requests by the tokens of the coming epoch."""
        steps = {}
        for occupancy in self.packer.packing.active():
            name = occupancy.group.name
            step_s = self.speed.step_s + self.speed.context_token_s * occupancy.used
            credit = self._credit.get(name, 0.0) + self.epoch_s / step_s
            steps[name] = int(credit)
            self._credit[name] = credit - steps[name]
        updates = {}
        for id, one in self._running.items():
            if id not in done and one.ready_s <= now_s and steps.get(one.group):
                one.generated = min(one.generated + steps[one.group], one.request.output_tokens)
                updates[id] = Growth(
                    one.request.prompt_tokens + one.generated,
                    one.request.prompt_tokens + self._expected(one.request, one.generated),
                )
        return updates

    def _arrival(self, one: _Running) -> Arrival:
        prompt = one.request.prompt_tokens
        expected = prompt + self._expected(one.request, one.generated)
        return Arrival(one.request.id, one.request.service, prompt + one.generated, expected)

    def _start(self, one: _Running, group: str, now_s: float) -> None:
        one.group = group
        one.ready_s = now_s + self.speed.prefill_token_s * (one.request.prompt_tokens + one.generated)
        self._running[one.request.id] = one

    def _note(self, migrations: int) -> None:
        packing, run = self.packer.packing, self._run
        active = packing.active()
        run.active.append(len(active))
        run.fewest.append(packing.fewest_groups())
        run.used.append(packing.used)
        run.capacity.append(sum(one.group.capacity for one in active))
        run.migrations.append(migrations)
