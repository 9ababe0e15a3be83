"""After a step that failed: plans in flight are taken back, and their requests are tried again."""

from collections.abc import Mapping, Sequence

import numpy as np

from shoal.core import FinishReason, TokenEvent
from shoal.schedule.output import OutputProcessor
from shoal.schedule.plan_builder import InFlightStep
from shoal.schedule.policies.orders import Turn
from shoal.schedule.request_state import RequestState
from shoal.schedule.request_store import RequestStore
from shoal.schedule.service_state import ServiceState

_ALONE = "the model failed to compute this request, also by itself: {}"


class Recovery:
    """Takes plans back that made nothing.

    The requests of the plan that failed are preempted: the executor forgets how far it came with them, and
    they go on from their last step that succeeded, in smaller steps (see ``StepLimit``). One that fails by
    itself ends. Those of the plans behind it, which were not run, stay as they were before.
    """

    def __init__(self, store: RequestStore, outputs: OutputProcessor) -> None:
        self._store = store
        self._outputs = outputs

    def rollback(self, steps: Sequence[InFlightStep], error: str, now_ns: int) -> list[TokenEvent]:
        """Take all plans in flight back, the oldest first, which failed; returns the ends of requests."""
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
    """Before each turn one for those of its service who wait since a step failed, apart from all others."""
    trials = {
        name: Turn(name, np.zeros(0, dtype=np.int64), waiting=suspects, prefill=True)
        for name, state in services.items()
        if (suspects := state.limit.suspects())
    }
    if not trials:
        return turns
    tried = []
    for turn in turns:
        if turn.service in trials:
            tried.append(trials[turn.service])
        tried.append(turn)
    return tried
