"""Tells a manager what happens, and carries out what it decides."""

from collections import deque
from collections.abc import Callable, Sequence

from shoal.cluster.manager.actions import (
    ClusterAction,
    Dispatch,
    KillEngine,
    LoadService,
    RefusalKind,
    Refuse,
    StartEngine,
    UnloadService,
    Withdraw,
)
from shoal.cluster.manager.events import ClusterEvent
from shoal.cluster.manager.manager import Manager
from shoal.cluster.router.call import Call
from shoal.cluster.router.call_table import Calls
from shoal.cluster.router.fleet import Fleet
from shoal.cluster.router.migration_runner import Mover
from shoal.core import EngineDied, ServiceUnavailable
from shoal.engine import wire

OnDecision = Callable[[int, ClusterEvent, Sequence[ClusterAction]], None]
"""Told of every event, its time, and what was decided."""

# When to ask again for a service that no engine runs: loading takes longer.
_NO_ENGINE_RETRY_S = 5.0


class ActionRunner:
    """The manager's ears and hands.

    clock: nanoseconds.
    """

    def __init__(
        self,
        manager: Manager,
        fleet: Fleet,
        calls: Calls,
        mover: Mover,
        *,
        clock: Callable[[], int],
        on_decision: OnDecision | None,
    ) -> None:
        self._manager = manager
        self._fleet = fleet
        self._calls = calls
        self._mover = mover
        self._clock = clock
        self._on_decision = on_decision
        self._untold: deque[ClusterEvent] = deque()
        self._telling = False

    def tell(self, event: ClusterEvent) -> None:
        """Tell the manager what happened, and carry out what it decides, one event after the other."""
        self._untold.append(event)
        if self._telling:
            return
        self._telling = True
        try:
            while self._untold:
                event, now_ns = self._untold.popleft(), self._clock()
                decided = self._manager.handle(event, now_ns)
                if self._on_decision is not None:
                    self._on_decision(now_ns, event, decided)
                for action in decided:
                    self._carry_out(action)
        finally:
            self._telling = False

    def _carry_out(self, action: ClusterAction) -> None:
        match action:
            case Dispatch():
                self._dispatch_call(action)
            case Withdraw():
                if (call := self._calls.get(action.request)) is not None:
                    self._calls.withdraw(call)
            case Refuse():
                if (call := self._calls.get(action.request)) is not None:
                    self._refuse(call, action)
            case StartEngine():
                self._fleet.start_engine(action.engine, action.incarnation, action.services)
            case LoadService() | UnloadService():
                self._fleet.change_services(action)
            case KillEngine():
                self._fleet.kill_engine(action.engine, action.incarnation, action.why)
            case _:
                self._mover.carry_out(action)

    def _dispatch_call(self, action: Dispatch) -> None:
        """Send the rest of a call to an engine."""
        call = self._calls.get(action.request)
        if call is None:
            return
        engine = self._fleet.engines[action.engine]
        self._calls.assign(call, action.engine, action.attempt)
        engine.send(wire.Submit.from_requests(call.rest(self._clock())))

    def _refuse(self, call: Call, action: Refuse) -> None:
        if action.kind is RefusalKind.NO_ENGINE:
            self._calls.end(call, ServiceUnavailable(action.message, _NO_ENGINE_RETRY_S))
        else:
            self._calls.end(call, EngineDied(action.message))
