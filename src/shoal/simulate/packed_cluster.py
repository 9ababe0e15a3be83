"""Growing requests on many engines that a packer packs: a light simulation, epoch by epoch.

It keeps no blocks and runs no scheduler: an engine is its memory in tokens, and a step time that is linear in
the KV it reads. So hundreds of thousands of requests take minutes.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from shoal.cluster.packing import Arrival, Growth, Operations, Packer
from shoal.core import ConfigError


@dataclass(frozen=True, slots=True)
class GrowingRequest:
    """A request whose lengths are known beforehand, to the simulation only."""

    id: str
    """Unique in the run."""
    arrival_s: float
    """When it comes."""
    prompt_tokens: int
    """KV that it has after its prefill."""
    output_tokens: int
    """Tokens that it generates, one in each decode step."""
    service: str = "default"
    """The service that it asks."""


@dataclass(frozen=True, slots=True)
class EngineSpeed:
    """Times of an engine."""

    step_s: float
    """A decode step, without the KV that it reads."""
    context_token_s: float
    """Reading one token's KV in a step."""
    prefill_token_s: float
    """Computing one token of a prompt, or of a preempted request again."""

    def alone_s(self, request: GrowingRequest) -> float:
        """From arrival to the last token where nobody else is on the engine."""
        context = request.prompt_tokens + request.output_tokens / 2
        return self.prefill_token_s * request.prompt_tokens + request.output_tokens * (
            self.step_s + self.context_token_s * context
        )


Expected = Callable[[GrowingRequest, int], int]
"""The output length expected of a request that has generated so many tokens."""


@dataclass(slots=True)
class _Running:
    """A request under way."""

    request: GrowingRequest
    generated: int = 0
    """Tokens, those of the coming epoch included."""
    ready_s: float = 0.0
    """When its prefill is done."""
    group: str = ""
    """Where it is."""


@dataclass(slots=True)
class PackedRun:
    """What came of it. Lists have an entry for each epoch."""

    epoch_s: float
    """Length of an epoch in seconds."""
    active: list[int]
    """Active groups."""
    fewest: list[int]
    """Groups that any packing of the requests needs, by their sizes."""
    used: list[int]
    """Tokens of KV."""
    capacity: list[int]
    """Tokens that the active groups could hold."""
    migrations: list[int]
    """Requests moved."""
    latencies: list[float]
    """Of finished requests: time from arrival to the end, as a multiple of the time alone."""
    requests: int = 0
    """Requests that came."""
    preemptions: int = 0
    """How often a request lost its KV."""

    @property
    def finished(self) -> int:
        """Requests that ended; those that were lost did not."""
        return len(self.latencies)


class PackedCluster:
    """Engines that step by themselves; at the beginning of every epoch the packer is told of it.

    Sizes that the packer sees are those at the end of the coming epoch, so that memory always suffices
    until it is asked again. expected: passed on to the packer. batched: the operations of an epoch are
    given together, otherwise one after the other. waits: requests for which there is no room wait, in front
    of later ones; otherwise they are lost, as are preempted ones. A migration takes no time, and a request
    that is preempted keeps the tokens of the epoch that begins.
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
        """Serve all; ``requests`` by arrival. Raises ConfigError for one that fits in no group even alone."""
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
        """Requests that generated their last token in the epoch that has just ended."""
        return [id for id, one in self._running.items() if one.generated >= one.request.output_tokens]

    def _end(self, ids: Sequence[str], now_s: float) -> None:
        for id in ids:
            request = self._running.pop(id).request
            self._run.latencies.append((now_s - request.arrival_s) / self.speed.alone_s(request))

    def _grow(self, now_s: float, done: Collection[str]) -> dict[str, Growth]:
        """Tokens of the coming epoch, of requests that are not done."""
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
