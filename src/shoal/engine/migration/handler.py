"""MigrationHandler: carries out the client's migration commands, and transfers KV, between two steps.

There is no thread: it works while no plan is in flight, as service changes do. KV sent and written index a
time is bounded, because running requests wait meanwhile.
"""

from collections import deque

from shoal.core import Request
from shoal.engine.migration import wire as migration_wire
from shoal.engine.migration.engine_access import EngineAccess
from shoal.engine.migration.exports import Exports
from shoal.engine.migration.imports import Imports
from shoal.engine.migration.wire import Abort, Commit, Drop, Export, Release, Reserve


class MigrationHandler:
    """Carries out migration commands in the order in which they came."""

    def __init__(self, engine: EngineAccess) -> None:
        self._engine = engine
        self._commands: deque[migration_wire.ToEngine] = deque()
        self._exports = Exports(engine)
        self._imports = Imports(engine)

    @property
    def ready(self) -> bool:
        """Whether ``work`` has something to do."""
        return bool(self._commands) or self._engine.transfer.can_receive() or self._exports.ready

    @property
    def expecting(self) -> bool:
        """Whether a request is about to join, which should wait for index most one plan."""
        return self._imports.expecting

    @property
    def blocked(self) -> bool:
        """Whether blocks wait for the transfer to accept them; ``ready`` must be polled."""
        return self._exports.blocked

    def add(self, command: migration_wire.ToEngine) -> None:
        """Queue a command for the next ``work``."""
        self._commands.append(command)

    def cancel(self, request_id: str) -> None:
        """Cancel a request that is committed or about to resume here."""
        self._imports.cancel(request_id)
        for index, command in enumerate(self._commands):
            if isinstance(command, Commit) and command.request.id == request_id:
                self._commands[index] = Drop(command.migration)
            elif isinstance(command, Abort) and self._exports.resumed_id(command) == request_id:
                self._commands[index] = Release(command.migration)

    def detach(self, request_id: str) -> Request | None:
        """Remove a request that was stopped here, with its output; None: there is none of that id.

        Later commands about its migration are ignored.
        """
        released = {command.migration for command in self._commands if isinstance(command, Release)}
        return self._exports.detach(request_id, released)

    def clear(self) -> None:
        """End all migrations, as the client is gone."""
        self._commands.clear()
        self._exports.clear()
        self._imports.clear()

    def work(self) -> None:
        """Carry out commands, then write and send KV; no plan is in flight."""
        self._engine.run(self._engine.scheduler.pending_plan())
        while self._commands:
            self._handle(self._commands.popleft())
        self._imports.work(self._engine.transfer.turn_bytes)
        self._exports.work(self._engine.transfer.turn_bytes)

    def _handle(self, command: migration_wire.ToEngine) -> None:
        match command:
            case Reserve():
                self._imports.reserve(command)
            case Commit():
                self._imports.commit(command)
            case Drop():
                self._imports.drop(command)
            case Export():
                self._exports.begin(command)
            case Abort():
                self._exports.abort(command)
            case Release():
                self._exports.release(command.migration)
