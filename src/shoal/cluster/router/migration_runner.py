"""Carries moves of running requests out, for a manager that decides on them."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

from shoal.cluster.manager.actions import (
    Abort,
    Commit,
    Drop,
    Export,
    MoveAction,
    MoveEnded,
    MoveOutcome,
    Release,
    Reserve,
)
from shoal.cluster.manager.events import ClusterEvent, MoveMethod
from shoal.cluster.manager.migration_events import event_of
from shoal.cluster.router.call_table import Calls
from shoal.cluster.router.fleet import Fleet
from shoal.core import Request
from shoal.engine.migration import wire as migration_wire

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Move:
    """What only its messages tell of a migration."""

    request: str
    """The call that moves."""
    stopped: migration_wire.Stopped | None = None
    """What the source said in the end."""
    committed: str | None = None
    """What the call's choice is called at the destination."""


class Mover:
    """Sends engines what a manager decides on migrations, and tells it what they answer.

    KV goes from engine to engine; here are only words about it. tell: takes events for the manager.
    """

    def __init__(
        self,
        fleet: Fleet,
        calls: Calls,
        tell: Callable[[ClusterEvent], None],
        clock: Callable[[], int],
    ) -> None:
        self._fleet = fleet
        self._calls = calls
        self._tell = tell
        self._clock = clock
        self._moves: dict[str, _Move] = {}

    def carry_out(self, action: MoveAction) -> None:
        """Do what the manager decided."""
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
                move = self._moves.get(action.migration)
                committed = None if move is None else move.committed
                self._fleet.send(action.engine, migration_wire.Drop(action.migration, committed))
            case MoveEnded():
                self._end(action)

    def handle(self, engine: str, message: migration_wire.FromEngine) -> None:
        """Tell the manager what an engine said of a migration that is not over."""
        migration = message.migration
        move = self._moves.get(migration)
        if move is None:
            return
        if isinstance(message, migration_wire.Stopped):
            self._stopped(engine, move, message)
        else:
            self._tell(event_of(message))

    def _reserve(self, action: Reserve) -> None:
        call = self._calls.get(action.request)
        if call is not None:
            self._moves[action.migration] = _Move(action.request)
            tokens = call.prompt_tokens + call.output_tokens
            self._fleet.send(action.engine, migration_wire.Reserve(action.migration, call.service, tokens))

    def _export(self, action: Export) -> None:
        call = self._calls.get(action.request)
        if call is not None:
            [request_id] = call.wire_ids()
            to = self._fleet.engines[action.to].transfer
            message = migration_wire.Export(action.migration, request_id, to, action.live)
            self._fleet.send(action.engine, message)

    def _stopped(self, engine: str, move: _Move, message: migration_wire.Stopped) -> None:
        """All that the source has told of the call has come before this, and was delivered."""
        call = self._calls.get(move.request)
        if call is None:
            return
        if call.output_tokens != message.output_tokens:
            why = f"{call.log_name} stopped at token {message.output_tokens} after {call.output_tokens}"
            self._fleet.kill_inconsistent(engine, why)
            return
        move.stopped = message
        self._tell(event_of(message))

    def _commit(self, action: Commit) -> None:
        call, move = self._calls.get(action.request), self._moves.get(action.migration)
        if call is None or move is None or move.stopped is None:
            return
        stopped = move.stopped
        self._calls.assign(call, action.engine, action.attempt, moves=True)
        [rest] = call.rest(self._clock())
        move.committed = rest.id
        request = _carrying(rest, stopped)
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

    def _end(self, action: MoveEnded) -> None:
        move = self._moves.pop(action.migration, None)
        call = self._calls.get(action.request)
        if call is None or action.outcome is MoveOutcome.ENDED:
            return
        between = f"from engine {action.source} to {action.target}"
        if action.outcome is MoveOutcome.ABORTED:
            _log.info("%s: not moved %s: %s", call.log_name, between, action.why)
            return
        what = "by its tokens"
        if action.method is not MoveMethod.TOKENS and move is not None and move.stopped is not None:
            what = f"{move.stopped.computed} tokens of KV"
        _log.info("%s: moved %s in %.0f ms, %s", call.log_name, between, action.took_s * 1e3, what)


def _carrying(rest: Request, stopped: migration_wire.Stopped) -> Request:
    """What is left of a request, with the counts of the engine before and the ages as clients see them."""
    ages = rest.resume_state
    assert ages is not None
    state = replace(
        stopped.resume_state,
        max_new_tokens=ages.max_new_tokens,
        age_ns=ages.age_ns,
        first_token_age_ns=ages.first_token_age_ns,
        last_token_age_ns=ages.last_token_age_ns,
    )
    return replace(rest, resume_state=state)
