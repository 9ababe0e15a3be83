"""Weighted turns: services step in turn, often those that many short requests ask."""

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
    """Doubling budget inside a service and for memory; between services, turns by weight.

    A step of a service brings each of its N requests nearer to its end, which takes about L for each and
    counts 1 / L in the mean normalised latency. By Smith's rule the service with the largest N / L^2 should
    step. But if it always did, its batches would stay small while those of others wait: a step costs nearly
    the same for one request as for ten, so that the engine would lose throughput, and under load everybody
    would wait longer. So the weight (N / L^2)^1.5 is multiplied by the number of steps since the service's
    last turn: each then steps about as often as its weight says, at light load those with short requests
    nearly always, and under load batches build up.

    Where services on the same weights decode together, a step brings the decodes of all of them nearer to
    their ends, so that N / L^2 is summed over them. A prompt holds up none of these decodes, and soon has a
    turn. For prompts, steps of others are no turns, because they compute none of them.

    L is what a request takes alone, where that is known. Otherwise it is the mean execution time, which
    includes what was computed for others in the same steps: long prompts of a busy service inflate it, and
    such a service then gets too few turns.

    Ours; doubling budget (SeaLLM) gives who is preempted, and the order within a service. The exponent is
    the result of simulations: 2 gives somewhat lower means and longer tails, 1 the reverse.
    """

    def rank(self, request: RequestState, view: ServiceView) -> float:
        """As doubling budget, but whose answer has begun, or who was preempted, comes before all others."""
        begun = request.num_generated > 0 or request.num_preemptions > 0
        return -math.inf if begun else _BUDGETS.rank(request, view)

    def keys(self, view: ServiceView, table: RequestTable) -> FloatArray:
        """As doubling budget."""
        return _BUDGETS.keys(view, table)

    def decide(self, view: SchedulerView, now_ns: int) -> Decision:
        """Every service's turns, by weight and steps since its last."""
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
