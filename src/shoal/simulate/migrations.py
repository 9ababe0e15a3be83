"""Requests that move between simulated engines: the manager's orders, and what engines answer.

The engines' own code keeps room, sends KV while requests run, and lets them run elsewhere
(``engine.exports``, ``engine.imports``); between them is a ``Network``.
"""

from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from shoal.cluster.manager.actions import Abort, Commit, Drop, Export, MoveAction, MoveEnded, Release, Reserve
from shoal.cluster.manager.events import MoveEvent
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
class _Move:
    """What the manager does not know of a migration."""

    request: str
    """Who moves."""
    block_bytes: int
    """Of its KV."""
    stopped: migration_wire.Stopped | None = None
    """What the source said in the end."""
    committed: bool = False
    """Whether the destination was told whose KV it is."""


class Moves:
    """Carries out what a manager decides on migrations, as ``cluster.mover`` does between real engines.

    specs: of the engines by number, and replicas, which may be replaced. requests: those that have not ended,
    by id, with what was known of each when it last changed hands. places: the numbers of the engines that
    have them. tell: takes events for the manager. touch: told of engines that got something to do.
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
        tell: Callable[[MoveEvent], None],
        touch: Callable[[int], None],
    ) -> None:
        self._specs = specs
        self._replicas = replicas
        self._requests = requests
        self._places = places
        self._clock = clock
        self._timers = timers
        self._tell = tell
        self._touch = touch
        self._moves: dict[str, _Move] = {}
        self._network = Network(link, timers, clock, self._block_bytes)
        self._ports: dict[int, Port] = {}
        for number, replica in enumerate(replicas):
            self.began(number, replica)

    def __len__(self) -> int:
        """Migrations with KV that are not over."""
        return len(self._moves)

    def began(self, number: int, replica: Replica) -> None:
        """An engine begins, in place of an earlier one of its number if there was one."""
        if number in self._ports:
            self._network.close(self._ports[number])

        def woken() -> None:
            replica.interrupt()
            self._touch(number)

        self._ports[number] = self._network.open(number, woken)
        replica.connect(self._ports[number], partial(self._answer, number, replica))

    def carry_out(self, action: MoveAction) -> None:
        """Do what the manager decided."""
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
                    self._replicas[self._places[action.request]].expect_nothing_of(action.request)
                    self._places[action.request] = int(action.engine)
                self._order(action.engine, migration_wire.Abort(migration))
            case Release():
                self._order(action.engine, migration_wire.Release(migration))
            case Drop():
                move = self._moves.get(migration)
                committed = action.request if move is not None and move.committed else None
                self._order(action.engine, migration_wire.Drop(migration, committed))
            case MoveEnded():
                self._moves.pop(migration, None)

    def _reserve(self, action: Reserve) -> None:
        number, request = int(action.engine), self._requests.get(action.request)
        if request is None:
            return
        layout = self._specs[number].layout
        block_bytes = layout.services[request.service].shape.block_bytes(layout.block_size)
        self._moves[action.migration] = _Move(request.id, block_bytes)
        tokens = self._replicas[self._places[request.id]].num_tokens(request.id)
        if tokens is None:
            tokens = len(request.prompt) + request.num_output_tokens
        self._order(action.engine, migration_wire.Reserve(action.migration, request.service, tokens))

    def _commit(self, action: Commit) -> None:
        move = self._moves[action.migration]
        if action.request not in self._requests:
            return
        move.committed, stopped = True, move.stopped
        assert stopped is not None
        request = aged(self._requests[action.request], self._clock.now_ns)
        self._order(action.engine, migration_wire.Commit(action.migration, request, stopped.computed))
        self._places[request.id] = int(action.engine)
        self._replicas[int(action.engine)].expect(request)

    def _order(self, engine: str, order: migration_wire.ToEngine) -> None:
        number = int(engine)
        self._replicas[number].order(order)
        self._touch(number)

    def _answer(self, number: int, replica: Replica, message: wire.FromEngine) -> None:
        """An engine says something, which is heard a moment later."""
        assert isinstance(message, migration_wire.FromEngine)
        time_ns = self._clock.now_ns + self._network.latency_ns
        self._timers.set(time_ns, partial(self._hear, number, replica, message), number)

    def _hear(self, number: int, replica: Replica, message: migration_wire.FromEngine) -> None:
        move = self._moves.get(message.migration)
        if self._replicas[number] is not replica or move is None:
            return
        if isinstance(message, migration_wire.Stopped):
            move.stopped = message
            self._requests[move.request] = replace(
                self._requests[move.request],
                output_tokens=message.output_tokens,
                resume_state=message.resume_state,
            )
        self._tell(event_of(message))

    def _block_bytes(self, migration: str) -> int:
        move = self._moves.get(migration)
        return 0 if move is None else move.block_bytes


def aged(request: Request, now_ns: int) -> Request:
    """A request that is submitted now, whose ages were taken earlier on the same clock."""
    state = request.resume_state
    return request if state is None else request.aged(now_ns - request.arrival_ns - state.age_ns)
