"""The side of engines in migrations, for engines that have no KV: a request goes as its tokens, once its
"bytes" have come. Messages mean what ``migration_wire`` says.
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from shoal.core import Request
from shoal.engine import migration_wire as wire

if TYPE_CHECKING:
    from fake_cluster import FakeBackend, FakeProcess


@dataclass
class Lease:
    """Room for a request that comes."""

    tokens: list[int] | None = None
    """What its KV is of, once that has come."""
    commit: wire.Commit | None = None


@dataclass
class Leaving:
    """A request that is being sent."""

    message: wire.Export
    rounds: int
    """Rounds that are still to come before it is stopped."""


class FakeMoves:
    """Of one process."""

    def __init__(self, backend: "FakeBackend", process: "FakeProcess") -> None:
        self._backend = backend
        self._process = process
        self.leases: dict[str, Lease] = {}
        self.leaving: dict[str, Leaving] = {}
        self.held: dict[str, Request] = {}

    @property
    def empty(self) -> bool:
        return not self.leases and not self.leaving and not self.held

    def handle(self, message: wire.ToEngine) -> None:
        random, migration = self._backend.moves, message.migration
        match message:
            case wire.Reserve():
                if random.random() < self._backend.declines:
                    self._say(wire.Declined(migration, "there is no room"))
                else:
                    self.leases.setdefault(migration, Lease())
                    self._say(wire.Reserved(migration))
            case wire.Export():
                rounds = random.randrange(4) if message.live else 0
                self.leaving.setdefault(migration, Leaving(message, rounds))
            case wire.Commit():
                self._commit(message)
            case wire.Abort():
                self.leaving.pop(migration, None)
                request = self.held.pop(migration, None)
                if request is not None:
                    self._submit(replace(request, id=message.request_id or request.id))
            case wire.Release():
                self.leaving.pop(migration, None)
                self.held.pop(migration, None)
            case wire.Drop():
                self.leases.pop(migration, None)
                if message.request_id is not None and message.request_id not in self._process.live:
                    self._say(wire.Failed(migration, "it was dropped"))

    def cancel(self, request_id: str) -> None:
        """A request that waits for its KV is not wanted any more."""
        for migration, lease in list(self.leases.items()):
            if lease.commit is not None and lease.commit.request.id == request_id:
                del self.leases[migration]

    def arrive(self, migration: str, tokens: list[int]) -> None:
        """KV has come."""
        lease = self.leases.get(migration)
        if lease is not None:
            lease.tokens = tokens

    def step(self) -> None:
        """Send what is to go, and begin what has come; between two steps of the engine."""
        for migration, lease in list(self.leases.items()):
            if lease.commit is not None and lease.tokens is not None:
                del self.leases[migration]
                request = lease.commit.request
                assert [*request.prompt, *request.output_tokens] == lease.tokens
                assert lease.commit.computed == len(lease.tokens) - 1
                self._submit(request)
        for migration, leaving in list(self.leaving.items()):
            self._send(migration, leaving)

    def _commit(self, message: wire.Commit) -> None:
        lease = self.leases.get(message.migration)
        if lease is None:
            self._say(wire.Failed(message.migration, "there is no room for it"))
        else:
            lease.commit = message

    def _submit(self, request: Request) -> None:
        self._process.live[request.id] = 0
        self._process.core.submit(request)

    def _send(self, migration: str, leaving: Leaving) -> None:
        request_id = leaving.message.request_id
        if request_id not in self._process.live:
            del self.leaving[migration]
            self._say(wire.NotExported(migration, "it is not here"))
            return
        if leaving.rounds:
            leaving.rounds -= 1
            self._say(wire.Copied(migration, 1))
            return
        request = self._process.core.detach(request_id)
        if request is None:
            return  # it is about to end
        del self.leaving[migration], self._process.live[request_id]
        self.held[migration] = request
        tokens = [*request.prompt, *request.output_tokens]
        self._send_bytes(leaving.message.to, migration, tokens)
        carried = request.carried
        assert carried is not None
        self._say(wire.Stopped(migration, len(request.output_tokens), len(tokens) - 1, carried))

    def _send_bytes(self, to: str, migration: str, tokens: list[int]) -> None:
        """They arrive a while later, if they do, and if this process is alive then."""
        name, _, incarnation = to.partition("/")

        def arrive() -> None:
            target = self._backend.processes[name]
            if target.incarnation == int(incarnation) and self._process.alive and target.alive:
                target.moves.arrive(migration, tokens)

        if self._backend.moves.random() >= self._backend.lost_kv:
            self._backend.loop.call_later(self._backend.moves.uniform(0, 0.1), arrive)

    def _say(self, message: wire.FromEngine) -> None:
        self._backend.deliver(self._process, message)
