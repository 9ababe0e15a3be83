"""Executes the manager's migration actions: sends messages to engines, emits their answers as events."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

from shoal.cluster.manager.actions import (
    Abort,
    Commit,
    Drop,
    Export,
    MigrationAction,
    MigrationEnded,
    MigrationOutcome,
    Release,
    Reserve,
)
from shoal.cluster.manager.events import ClusterEvent, MigrationMethod
from shoal.cluster.manager.migration_events import event_of
from shoal.cluster.router.call_table import CallTable
from shoal.cluster.router.fleet import Fleet
from shoal.core import Request
from shoal.engine.migration import wire as migration_wire

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _MigrationMessages:
    """What the messages of a migration said, which the manager does not know."""

    request: str
    stopped: migration_wire.Stopped | None = None
    committed: str | None = None
    """Id of the choice at the destination."""


class MigrationRunner:
    """Executes migration actions; emit: takes events for the manager.

    KV is sent from engine to engine directly.
    """

    def __init__(
        self,
        fleet: Fleet,
        calls: CallTable,
        emit: Callable[[ClusterEvent], None],
        clock: Callable[[], int],
    ) -> None:
        self._fleet = fleet
        self._calls = calls
        self._emit = emit
        self._clock = clock
        self._active: dict[str, _MigrationMessages] = {}

    def execute(self, action: MigrationAction) -> None:
        match action:
            case Reserve():
                self._reserve(action)
            case Export():
                self._export(action)
            case Commit():
                self._commit(action)
            case Abort():
                self._abort(action)
            case Release():
                self._fleet.send(action.engine, migration_wire.Release(action.migration))
            case Drop():
                migration = self._active.get(action.migration)
                committed = None if migration is None else migration.committed
                self._fleet.send(action.engine, migration_wire.Drop(action.migration, committed))
            case MigrationEnded():
                self._end(action)

    def handle(self, engine: str, message: migration_wire.FromEngine) -> None:
        """Emit the event of an engine's answer, if the migration is not over."""
        migration = self._active.get(message.migration)
        if migration is None:
            return
        if isinstance(message, migration_wire.Stopped):
            self._stopped(engine, migration, message)
        else:
            self._emit(event_of(message))

    def _reserve(self, action: Reserve) -> None:
        call = self._calls.get(action.request)
        if call is not None:
            self._active[action.migration] = _MigrationMessages(action.request)
            tokens = call.prompt_tokens + call.output_tokens
            self._fleet.send(action.engine, migration_wire.Reserve(action.migration, call.service, tokens))

    def _export(self, action: Export) -> None:
        call = self._calls.get(action.request)
        if call is not None:
            [request_id] = call.wire_ids()
            to = self._fleet.engines[action.to].transfer
            message = migration_wire.Export(action.migration, request_id, to, action.live)
            self._fleet.send(action.engine, message)

    def _stopped(self, engine: str, migration: _MigrationMessages, message: migration_wire.Stopped) -> None:
        """The source has stopped. Its tokens of the call came before this message and were delivered."""
        call = self._calls.get(migration.request)
        if call is None:
            return
        if call.output_tokens != message.output_tokens:
            why = f"{call.log_name} stopped at token {message.output_tokens} after {call.output_tokens}"
            self._fleet.kill_inconsistent(engine, why)
            return
        migration.stopped = message
        self._emit(event_of(message))

    def _commit(self, action: Commit) -> None:
        call, migration = self._calls.get(action.request), self._active.get(action.migration)
        if call is None or migration is None or migration.stopped is None:
            return
        stopped = migration.stopped
        self._calls.assign(call, action.engine, action.attempt, with_kv=True)
        [remaining] = call.remaining_requests(self._clock())
        migration.committed = remaining.id
        request = _with_resume_state(remaining, stopped)
        message = migration_wire.Commit(action.migration, request, stopped.computed)
        self._fleet.send(action.engine, message)

    def _abort(self, action: Abort) -> None:
        call = self._calls.get(action.request)
        if call is None:
            self._fleet.send(action.engine, migration_wire.Release(action.migration))
            return
        request_id = None
        if action.attempt is not None:
            self._calls.assign(call, action.engine, action.attempt)
            [request_id] = call.wire_ids()
        self._fleet.send(action.engine, migration_wire.Abort(action.migration, request_id))

    def _end(self, action: MigrationEnded) -> None:
        migration = self._active.pop(action.migration, None)
        call = self._calls.get(action.request)
        if call is None or action.outcome is MigrationOutcome.ENDED:
            return
        between = f"from engine {action.source} to {action.target}"
        if action.outcome is MigrationOutcome.ABORTED:
            _log.info("%s: not moved %s: %s", call.log_name, between, action.why)
            return
        what = "by its tokens"
        if (
            action.method is not MigrationMethod.TOKENS
            and migration is not None
            and migration.stopped is not None
        ):
            what = f"{migration.stopped.computed} tokens of KV"
        _log.info("%s: moved %s in %.0f ms, %s", call.log_name, between, action.took_s * 1e3, what)


def _with_resume_state(remaining: Request, stopped: migration_wire.Stopped) -> Request:
    """The remaining request, with the source's counts and with ages as clients see them."""
    ages = remaining.resume_state
    assert ages is not None
    state = replace(
        stopped.resume_state,
        max_new_tokens=ages.max_new_tokens,
        age_ns=ages.age_ns,
        first_token_age_ns=ages.first_token_age_ns,
        last_token_age_ns=ages.last_token_age_ns,
    )
    return replace(remaining, resume_state=state)
