"""Recovery from failed steps: plans in flight are rolled back, and their requests are tried again."""

from collections.abc import Mapping, Sequence

import numpy as np

from shoal.core import FinishReason, TokenEvent
from shoal.schedule.output import OutputProcessor
from shoal.schedule.policies.orders import Turn
from shoal.schedule.request_state import RequestState
from shoal.schedule.request_store import RequestStore
from shoal.schedule.service_state import ServiceState
from shoal.schedule.step_tracker import InFlightStep

_ALONE = "the model failed to compute this request, also by itself: {}"


class Recovery:
    """Rolls back plans after a failed step.

    The requests of the failed plan are preempted: the executor drops their progress, and they continue from
    their last successful step, in smaller steps (see ``StepLimit``). A request that fails alone ends with an
    error. Requests of later plans in flight, which were not run, return to their earlier state.
    """

    def __init__(self, store: RequestStore, outputs: OutputProcessor) -> None:
        self._store = store
        self._outputs = outputs

    def rollback(self, steps: Sequence[InFlightStep], error: str, now_ns: int) -> list[TokenEvent]:
        """Roll back all plans in flight; the first one failed. Returns the last events of ended requests."""
        running = [request for step in steps for request in self._outputs.rollback(step)]
        events = [
            self._store.end(request, request.ending, now_ns)
            for request in dict.fromkeys(running)
            if request.ending is not None
        ]
        failed = steps[0]
        self._store.count_failure(failed.plan.service)
        for part in failed.parts:
            requests = [request for request in part.requests if not request.finished]
            limit = self._store.services[part.plan.service].limit
            if limit.failed(failed.plan, requests):
                return events + [self._end(request, error, now_ns) for request in requests]
            for request in requests:
                self._store.preempt(request, lacks_memory=False)
        return events

    def _end(self, request: RequestState, error: str, now_ns: int) -> TokenEvent:
        return self._store.end(request, FinishReason.ERROR, now_ns, error=_ALONE.format(error))


def prepend_suspect_turns(turns: Sequence[Turn], services: Mapping[str, ServiceState]) -> Sequence[Turn]:
    """Insert before each turn a separate one for waiting suspects of a failed step in the same service."""
    suspect_turns = {
        name: Turn(name, np.zeros(0, dtype=np.int64), waiting=suspects, prefill=True)
        for name, state in services.items()
        if (suspects := state.limit.suspects())
    }
    if not suspect_turns:
        return turns
    result = []
    for turn in turns:
        if turn.service in suspect_turns:
            result.append(suspect_turns[turn.service])
        result.append(turn)
    return result
