"""Passes events to the manager and executes its actions."""

from collections import deque
from collections.abc import Callable, Sequence

from shoal.cluster.manager.actions import (
    ClusterAction,
    Dispatch,
    FleetChanged,
    KillEngine,
    LoadService,
    RefusalKind,
    Refuse,
    StartEngine,
    StopEngine,
    UnloadService,
    Withdraw,
)
from shoal.cluster.manager.events import ClusterEvent
from shoal.cluster.manager.manager import Manager
from shoal.cluster.router.call import Call
from shoal.cluster.router.call_table import CallTable
from shoal.cluster.router.fleet import Fleet
from shoal.cluster.router.migration_runner import MigrationRunner
from shoal.core import EngineDied, ServiceUnavailable
from shoal.engine import wire

OnDecision = Callable[[int, ClusterEvent, Sequence[ClusterAction]], None]
"""Called with the time, the event and the actions."""

# Retry-After for a service without engines: shorter than loading.
_NO_ENGINE_RETRY_S = 5.0


class ActionRunner:
    """Passes events to the manager and executes its actions; clock: nanoseconds."""

    def __init__(
        self,
        manager: Manager,
        fleet: Fleet,
        calls: CallTable,
        migration_runner: MigrationRunner,
        *,
        clock: Callable[[], int],
        on_decision: OnDecision | None,
    ) -> None:
        self._manager = manager
        self._fleet = fleet
        self._calls = calls
        self._migration_runner = migration_runner
        self._clock = clock
        self._on_decision = on_decision
        self._queued_events: deque[ClusterEvent] = deque()
        self._processing = False

    def process(self, event: ClusterEvent) -> None:
        """Handle an event. Events that arise from its actions are queued and handled after it."""
        self._queued_events.append(event)
        if self._processing:
            return
        self._processing = True
        try:
            while self._queued_events:
                event, now_ns = self._queued_events.popleft(), self._clock()
                actions = self._manager.handle(event, now_ns)
                if self._on_decision is not None:
                    self._on_decision(now_ns, event, actions)
                for action in actions:
                    self._execute(action)
        finally:
            self._processing = False

    def _execute(self, action: ClusterAction) -> None:
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
                self._fleet.services.change(action)
            case KillEngine():
                self._fleet.kill_engine(action.engine, action.incarnation, action.why)
            case FleetChanged():
                self._fleet.report_change(action)
            case StopEngine():
                self._fleet.stop_engine(action.engine, action.incarnation)
            case _:
                self._migration_runner.execute(action)

    def _dispatch_call(self, action: Dispatch) -> None:
        """Send the remaining work of a call to an engine."""
        call = self._calls.get(action.request)
        if call is None:
            return
        engine = self._fleet.engines[action.engine]
        self._calls.assign(call, action.engine, action.attempt)
        if action.batch is not None:
            call.join_batch(action.batch, action.slice_tokens)
        engine.send(wire.Submit.from_requests(call.remaining_requests(self._clock())))

    def _refuse(self, call: Call, action: Refuse) -> None:
        if action.kind is RefusalKind.NO_ENGINE:
            self._calls.end(call, ServiceUnavailable(action.message, _NO_ENGINE_RETRY_S))
        else:
            self._calls.end(call, EngineDied(action.message))
