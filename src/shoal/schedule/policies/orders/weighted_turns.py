"""Order ``weighted-turns`` (default): services take turns, those with many short requests more often."""

import math
from dataclasses import dataclass

import numpy as np

from shoal.schedule.policies.orders.by_priority import ByPriority, Priority
from shoal.schedule.policies.orders.doubling_budget import DoublingBudget
from shoal.schedule.policies.orders.protocol import Decision, Turn
from shoal.schedule.policies.view import SchedulerView, ServiceTraits, ServiceView
from shoal.schedule.request_state import RequestState
from shoal.schedule.running_batch import FloatArray, RequestTable

_BUDGETS = DoublingBudget()
EXPONENT = 1.5


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightedTurns(ByPriority):
    """Doubling budget inside a service and for preemption; turns by weight between services.

    A step of a service makes progress for each of its N requests, which take about L each and count 1 / L in
    the mean normalised latency. By Smith's rule the service with the largest N / L^2 should step. But if it
    always did, its batches would stay small while requests of other services wait: a step costs nearly the
    same for one request as for ten, so throughput would fall, and under load all requests would wait longer.
    So the weight (N / L^2)^1.5 is multiplied by the number of steps since the service's last turn. Each
    service then steps about as often as its weight says: at light load those with short requests nearly
    always, while under load batches build up.

    With co-batching, a step makes progress for the decodes of all services on the same weights, so N / L^2 is
    summed over them. A prompt delays none of these decodes, and soon has a turn. For prompts, steps that
    another service led are no turns, because they compute no prompts of this one.

    L is the execution time of a request alone, if it is known. Otherwise it is the mean execution time, which
    includes the work for other requests in the same steps: long prompts of a busy service increase it, and
    such a service then gets too few turns.

    Our own order; doubling budget (SeaLLM) decides preemption and the order inside a service. The exponent is
    the result of simulations: 2 gives somewhat lower means and longer tails, 1 the reverse.
    """

    def rank(self, request: RequestState, view: ServiceView) -> float:
        """As doubling budget, but requests with output and preempted requests come first."""
        begun = request.num_generated > 0 or request.num_preemptions > 0
        return -math.inf if begun else _BUDGETS.rank(request, view)

    def keys(self, view: ServiceView, table: RequestTable) -> FloatArray:
        """As doubling budget."""
        return _BUDGETS.keys(view, table)

    def decide(self, view: SchedulerView, now_ns: int) -> Decision:
        """Every service's turns, by weight and the number of steps since its last turn."""
        turns: list[tuple[Priority, Turn]] = []
        for service in view.services.values():
            if not len(service.running) and not service.waiting:
                continue
            traits = service.traits
            others = sum([_decoding(view.services[name]) for name in service.companions])
            for (_, number), turn in self.turns(self.candidates(service)):
                requests = len(service.running) + (1 if turn.prefill and service.waiting else 0)
                steps = view.step - (service.last_turn if turn.prefill else service.last_step)
                weight = (_per_length(traits, requests) + others) ** EXPONENT
                turns.append(((-steps * weight, number), turn))
        turns.sort(key=lambda pair: pair[0])
        return Decision([turn for _, turn in turns])


def _decoding(view: ServiceView) -> float:
    """N / L^2 of a service's decodes."""
    running = view.running
    return _per_length(view.traits, len(running) - int(np.count_nonzero(running.prefilling)))


def _per_length(traits: ServiceTraits, requests: int) -> float:
    """N / L^2, in 1 / s^2."""
    alone_s = traits.mean_s if traits.alone_s is None else traits.alone_s
    return float(requests / max(alone_s, 1e-9) ** 2)
