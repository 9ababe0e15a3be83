"""Running requests that move from one engine to another.

The source runs the request until the destination is told to (``Commit``), then the destination does. Between
that and the destination's first token the source keeps the request's KV, so that it can go on if the other
fails. What a late, doubled or lost message does is in docs/cluster.md.
"""

from collections.abc import Mapping

from shoal.cluster.manager.actions import (
    Abort,
    ClusterAction,
    Commit,
    Dispatch,
    Drop,
    Export,
    MoveEnded,
    MoveOutcome,
    Release,
    Reserve,
    Withdraw,
)
from shoal.cluster.manager.assignment import Assignment
from shoal.cluster.manager.events import (
    MoveCopied,
    MoveDeclined,
    MoveEvent,
    MoveFailed,
    MoveMethod,
    MoveNotExported,
    MoveReserved,
    MoveStopped,
)
from shoal.cluster.manager.migration_state import Move, MoveState
from shoal.cluster.manager.state import Call, Engine
from shoal.cluster.status import EngineState

MOST_AT_ONCE = 4
"""Requests that leave an engine at once when it is drained."""
PROGRESS_NS = 10_000_000_000
"""A source or a destination that makes no progress for so long is not waited for."""
COMMIT_NS = 5_000_000_000
"""After this time without a token the destination is asked whether it has the request.

When it did not say no for as long again, the source keeps nothing any more.
"""
RETRY_NS = 1_000_000_000
"""After this time requests that could not leave an engine that is drained are tried again."""


class Migrations:
    """All migrations that are not over. Methods return what is to be done.

    What is told of migrations that are over, or not in the state for it, changes nothing.
    """

    def __init__(self, assignment: Assignment, engines: Mapping[str, Engine]) -> None:
        self._assignment = assignment
        self._engines = engines
        self._moves: dict[str, Move] = {}
        self._begun = 0

    def want(self, call: Call, engine: str | None, method: MoveMethod, now_ns: int) -> list[ClusterAction]:
        """Move a request to an engine (None: whichever the dispatch chooses), if it can go there.

        It can where it has an engine and is not suspected, and the other takes requests of its service and
        has room for all that it may become, if its own has.
        """
        source = call.engine
        if source is None or not source.lives or call.migration or call.suspected:
            return []
        others = [
            load
            for load in self._assignment.open_engines(call)
            if load.name != source.name
            and engine in (None, load.name)
            and (self._engines[load.name].has_room(call.told) or not source.has_room(call.told))
        ]
        if method is not MoveMethod.TOKENS:
            alike = [load for load in others if self.carries_kv(call, self._engines[load.name])]
            method, others = (method, alike) if alike else (MoveMethod.TOKENS, others)
        target = self._assignment.choose_target(call, others, now_ns) if others else None
        if target is None:
            return []
        self._begun += 1
        request = call.told.request
        self._assignment.reserve(call, target, now_ns)
        move = Move(f"{request}m{self._begun}", call, source, target, method, now_ns, now_ns)
        self._moves[move.id] = move
        call.migration = move.id
        if method is MoveMethod.TOKENS:
            return self._resume(move)
        move.go(MoveState.RESERVING)
        move.keep(target)
        return [Reserve(move.id, request, target.name)]

    def carries_kv(self, call: Call, target: Engine) -> bool:
        """Whether a request can move to an engine with its KV."""
        service, source = call.told.service, call.engine
        kv_format = None if source is None else source.kv_formats.get(service)
        return call.moves_kv and bool(kv_format) and target.kv_formats.get(service) == kv_format

    @property
    def drains(self) -> bool:
        """Whether requests are to leave engines."""
        return any(engine.state is EngineState.DRAINING and engine.calls for engine in self._engines.values())

    def drain(self, now_ns: int) -> list[ClusterAction]:
        """Move requests away from engines that are drained, a few at a time."""
        actions: list[ClusterAction] = []
        for engine in self._engines.values():
            if engine.state is not EngineState.DRAINING or now_ns < engine.drains_again_ns:
                continue
            leaving = sum(move.source is engine for move in self._moves.values())
            for call in list(engine.calls.values()):
                if leaving >= MOST_AT_ONCE:
                    break
                if now_ns >= call.stays_until_ns:
                    began = self.want(call, None, MoveMethod.LIVE, now_ns)
                    leaving += bool(began)
                    actions += began
        return actions

    def told(self, event: MoveEvent, now_ns: int) -> list[ClusterAction]:
        """An engine said something of a migration."""
        move = self._moves.get(event.migration)
        if move is None:
            return []
        match event, move.state:
            case MoveReserved(), MoveState.RESERVING:
                return self._reserved(move, now_ns)
            case MoveDeclined(), MoveState.RESERVING:
                move.source.drains_again_ns = now_ns + RETRY_NS
                return self._end(move, now_ns, MoveOutcome.ABORTED, event.why)
            case MoveCopied(), MoveState.COPYING:
                move.since_ns = now_ns
            case MoveStopped(), MoveState.COPYING:
                return self._stopped(move, now_ns)
            case MoveNotExported(), MoveState.COPYING:
                # It waits there for KV, which it can do anywhere.
                actions = self._abort(move, event.why, now_ns)
                return actions + self.want(move.call, move.target.name, MoveMethod.TOKENS, now_ns)
            case MoveFailed(), MoveState.COMMITTING:
                return self._failed(move, event.why, now_ns)
        return []

    def progressed(self, call: Call, now_ns: int) -> list[ClusterAction]:
        """A request got a token in its present attempt."""
        move = self._of(call)
        if move is None or move.state not in (MoveState.COMMITTING, MoveState.RESUMING):
            return []
        return self._settle(move, now_ns, MoveOutcome.DONE)

    def ended(self, call: Call, now_ns: int) -> list[ClusterAction]:
        """A request is over."""
        move = self._of(call)
        if move is None:
            return []
        actions: list[ClusterAction] = []
        if move.state is not MoveState.RESUMING:
            actions.append(Drop(move.id, call.told.request, move.target.name))
        if move.state is MoveState.COPYING:
            actions.append(Release(move.id, move.source.name))
        return actions + self._settle(move, now_ns, MoveOutcome.ENDED)

    def lost(self, call: Call, now_ns: int) -> list[ClusterAction]:
        """A request has no engine any more, because that is gone; it may be back at the source then."""
        move = self._of(call)
        if move is None:
            return []
        if move.state in (MoveState.RESERVING, MoveState.COPYING):
            drop = Drop(move.id, call.told.request, move.target.name)
            return [drop, *self._end(move, now_ns, MoveOutcome.ABORTED, "the source is gone")]
        why = "the destination is gone"
        if call.quarantined_ns is None and self._can_go_back(move):
            return self._go_back(move, why, now_ns)
        return self._settle(move, now_ns, MoveOutcome.ABORTED, why)

    def engine_gone(self, engine: Engine, now_ns: int) -> list[ClusterAction]:
        """An engine that has no requests any more is gone, with all that it keeps for requests of others."""
        actions: list[ClusterAction] = []
        for move in [move for move in self._moves.values() if move.keeper is engine]:
            if move.state is MoveState.COMMITTING:
                # It runs at the destination if all of its KV has left.
                move.keep(None)
                actions.append(Drop(move.id, move.call.told.request, move.target.name))
                continue
            if move.state is MoveState.COPYING:
                actions.append(Abort(move.id, move.call.told.request, move.source.name))
            actions += self._end(move, now_ns, MoveOutcome.ABORTED, "the destination is gone")
        return actions

    def ticked(self, now_ns: int) -> list[ClusterAction]:
        """Time passed."""
        actions: list[ClusterAction] = []
        for move in list(self._moves.values()):
            passed_ns = now_ns - move.since_ns
            if move.state is MoveState.COMMITTING and passed_ns >= COMMIT_NS:
                move.since_ns = now_ns
                if move.asked and move.keeper is move.source:
                    # It has the request, which waits there: two engines could wait for each other's copies.
                    move.keep(None)
                    actions.append(Release(move.id, move.source.name))
                move.asked = True
                actions.append(Drop(move.id, move.call.told.request, move.target.name))
            elif move.keeper is move.target and passed_ns >= PROGRESS_NS:
                move.call.moves_kv = False
                actions += self._abort(move, f"{move.state} for {passed_ns / 1e9:.0f} s", now_ns)
        return actions

    # What follows

    def _of(self, call: Call) -> Move | None:
        return None if call.migration is None else self._moves[call.migration]

    def _reserved(self, move: Move, now_ns: int) -> list[ClusterAction]:
        """The destination has room: let the source send."""
        if not _is_open(move.target):
            return self._abort(move, _CLOSED, now_ns)
        move.go(MoveState.COPYING)
        move.since_ns = now_ns
        live = move.method is MoveMethod.LIVE
        return [Export(move.id, move.call.told.request, move.source.name, move.target.name, live)]

    def _stopped(self, move: Move, now_ns: int) -> list[ClusterAction]:
        """The source has sent everything: the destination has the request from now on."""
        call, target = move.call, move.target
        if not _is_open(target):
            return self._abort(move, _CLOSED, now_ns)
        move.go(MoveState.COMMITTING)
        move.since_ns = now_ns
        move.keep(move.source)
        self._assignment.hand_over(call, target)
        return [Commit(move.id, call.told.request, target.name, call.attempt)]

    def _failed(self, move: Move, why: str, now_ns: int) -> list[ClusterAction]:
        """The destination does not have the request that was committed to it."""
        move.call.moves_kv = False
        if self._can_go_back(move):
            return self._go_back(move, why, now_ns)
        withdrawn = self._assignment.withdraw(move.call, now_ns)
        return [withdrawn, *self._end(move, now_ns, MoveOutcome.ABORTED, why)]

    def _resume(self, move: Move) -> list[ClusterAction]:
        """Take the request from the source, and dispatch it to the destination with its tokens."""
        move.go(MoveState.RESUMING)
        call, target = move.call, move.target
        self._assignment.hand_over(call, target)
        request = call.told.request
        return [Withdraw(request), Dispatch(request, target.name, target.incarnation, call.attempt)]

    def _abort(self, move: Move, why: str, now_ns: int) -> list[ClusterAction]:
        """The request stays at the source, which was not told anything else yet."""
        request = move.call.told.request
        actions: list[ClusterAction] = [Drop(move.id, request, move.target.name)]
        if move.state is MoveState.COPYING:
            actions.append(Abort(move.id, request, move.source.name))
        move.call.stays_until_ns = now_ns + RETRY_NS
        return actions + self._end(move, now_ns, MoveOutcome.ABORTED, why)

    def _can_go_back(self, move: Move) -> bool:
        return move.keeper is move.source and move.source.lives

    def _go_back(self, move: Move, why: str, now_ns: int) -> list[ClusterAction]:
        """The request runs at the source again, which kept its KV."""
        call, source = move.call, move.source
        self._assignment.reserve(call, source, now_ns)
        self._assignment.hand_over(call, source)
        call.stays_until_ns = now_ns + RETRY_NS
        abort = Abort(move.id, call.told.request, source.name, call.attempt)
        return [abort, *self._end(move, now_ns, MoveOutcome.ABORTED, why)]

    def _settle(self, move: Move, now_ns: int, outcome: MoveOutcome, why: str = "") -> list[ClusterAction]:
        """End a migration after which the source has nothing of the request."""
        actions: list[ClusterAction] = []
        if move.keeper is move.source:
            actions.append(Release(move.id, move.source.name))
        return actions + self._end(move, now_ns, outcome, why)

    def _end(self, move: Move, now_ns: int, outcome: MoveOutcome, why: str = "") -> list[ClusterAction]:
        """Forget a migration."""
        if move.keeper is move.target:
            self._assignment.unreserve(move.call, move.target)
        move.go(outcome)
        move.keep(None)
        move.call.migration = None
        move.source.moves[move.method, outcome] += 1
        del self._moves[move.id]
        request, source, target = move.call.told.request, move.source.name, move.target.name
        took_s = (now_ns - move.began_ns) / 1e9
        return [MoveEnded(move.id, request, source, target, move.method, took_s, outcome, why)]


_CLOSED = "the destination takes no requests any more"


def _is_open(engine: Engine) -> bool:
    return engine.takes_requests and engine.reserved is None
