"""Migrations between simulated engines: executes the manager's migration actions, returns engines' answers.

The engines' own code (``engine.migration``) reserves room, sends KV and resumes requests, over a ``Network``.
"""

from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from shoal.cluster.manager.actions import (
    Abort,
    Commit,
    Drop,
    Export,
    MigrationAction,
    MigrationEnded,
    Release,
    Reserve,
)
from shoal.cluster.manager.events import MigrationEvent
from shoal.cluster.manager.migration_events import event_of
from shoal.core import Request
from shoal.core.cluster import Link
from shoal.engine import wire
from shoal.engine.migration import wire as migration_wire
from shoal.simulate.network import Network, Port
from shoal.simulate.replica import Replica, VirtualClock
from shoal.simulate.spec import EngineSpec
from shoal.simulate.timers import Timers


@dataclass(slots=True)
class _MigrationMessages:
    """What the messages of a migration said, which the manager does not know."""

    request: str
    block_bytes: int
    """Bytes of a block of its KV."""
    stopped: migration_wire.Stopped | None = None
    committed: bool = False
    """Whether ``Commit`` was sent."""


class MigrationRunner:
    """Executes migration actions, as ``cluster.router.migration_runner`` does between real engines.

    specs, replicas: of the engines by number; replicas may be replaced. requests: unfinished ones by id, as
    of their last dispatch. places: number of each request's engine. emit: takes events for the manager.
    touch: called with the number of an engine that got work.
    """

    def __init__(
        self,
        link: Link,
        specs: Sequence[EngineSpec],
        replicas: Sequence[Replica],
        requests: MutableMapping[str, Request],
        places: MutableMapping[str, int],
        clock: VirtualClock,
        timers: Timers,
        emit: Callable[[MigrationEvent], None],
        touch: Callable[[int], None],
    ) -> None:
        self._specs = specs
        self._replicas = replicas
        self._requests = requests
        self._places = places
        self._clock = clock
        self._timers = timers
        self._emit = emit
        self._touch = touch
        self._active: dict[str, _MigrationMessages] = {}
        self._network = Network(link, timers, clock, self._block_bytes)
        self._ports: dict[int, Port] = {}
        for number, replica in enumerate(replicas):
            self.engine_started(number, replica)

    def __len__(self) -> int:
        """Unfinished migrations with KV."""
        return len(self._active)

    def engine_started(self, number: int, replica: Replica) -> None:
        """An engine starts, perhaps in place of a dead one of the same number."""
        if number in self._ports:
            self._network.close(self._ports[number])

        def wake() -> None:
            replica.interrupt()
            self._touch(number)

        self._ports[number] = self._network.open(number, wake)
        replica.connect(self._ports[number], partial(self._answer, number, replica))

    def execute(self, action: MigrationAction) -> None:
        migration = action.migration
        match action:
            case Reserve():
                self._reserve(action)
            case Export():
                to = self._ports[int(action.to)].endpoint
                self._order(action.engine, migration_wire.Export(migration, action.request, to, action.live))
            case Commit():
                self._commit(action)
            case Abort():
                if action.attempt is not None:
                    self._replicas[self._places[action.request]].cancel_expected(action.request)
                    self._places[action.request] = int(action.engine)
                self._order(action.engine, migration_wire.Abort(migration))
            case Release():
                self._order(action.engine, migration_wire.Release(migration))
            case Drop():
                state = self._active.get(migration)
                committed = action.request if state is not None and state.committed else None
                self._order(action.engine, migration_wire.Drop(migration, committed))
            case MigrationEnded():
                self._active.pop(migration, None)

    def _reserve(self, action: Reserve) -> None:
        number, request = int(action.engine), self._requests.get(action.request)
        if request is None:
            return
        layout = self._specs[number].layout
        block_bytes = layout.services[request.service].shape.block_bytes(layout.block_size)
        self._active[action.migration] = _MigrationMessages(request.id, block_bytes)
        tokens = self._replicas[self._places[request.id]].num_tokens(request.id)
        if tokens is None:
            tokens = len(request.prompt) + request.num_output_tokens
        self._order(action.engine, migration_wire.Reserve(action.migration, request.service, tokens))

    def _commit(self, action: Commit) -> None:
        state = self._active[action.migration]
        if action.request not in self._requests:
            return
        state.committed, stopped = True, state.stopped
        assert stopped is not None
        request = aged(self._requests[action.request], self._clock.now_ns)
        self._order(action.engine, migration_wire.Commit(action.migration, request, stopped.computed))
        self._places[request.id] = int(action.engine)
        self._replicas[int(action.engine)].expect(request)

    def _order(self, engine: str, order: migration_wire.ToEngine) -> None:
        number = int(engine)
        self._replicas[number].migrate(order)
        self._touch(number)

    def _answer(self, number: int, replica: Replica, message: wire.FromEngine) -> None:
        """An engine answers; the answer arrives after the latency."""
        assert isinstance(message, migration_wire.FromEngine)
        time_ns = self._clock.now_ns + self._network.latency_ns
        self._timers.set(time_ns, partial(self._deliver, number, replica, message), number)

    def _deliver(self, number: int, replica: Replica, message: migration_wire.FromEngine) -> None:
        state = self._active.get(message.migration)
        if self._replicas[number] is not replica or state is None:
            return
        if isinstance(message, migration_wire.Stopped):
            state.stopped = message
            request = self._requests[state.request]
            made = message.output_tokens - request.num_output_tokens
            left = None if request.slice_tokens is None else max(1, request.slice_tokens - made)
            self._requests[state.request] = replace(
                request,
                output_tokens=message.output_tokens,
                resume_state=message.resume_state,
                slice_tokens=left,
            )
        self._emit(event_of(message))

    def _block_bytes(self, migration: str) -> int:
        state = self._active.get(migration)
        return 0 if state is None else state.block_bytes


def aged(request: Request, now_ns: int) -> Request:
    """A request to submit now, with its ages updated from an earlier time on the same clock."""
    state = request.resume_state
    return request if state is None else request.aged(now_ns - request.arrival_ns - state.age_ns)
