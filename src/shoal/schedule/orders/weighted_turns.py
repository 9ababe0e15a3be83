"""Weighted turns: services step in turn, often those that many short requests ask."""

from dataclasses import dataclass

from shoal.schedule.columns import Columns
from shoal.schedule.group import GroupView
from shoal.schedule.orders.by_priority import ByPriority, FloatArray, Offer, Ranked
from shoal.schedule.orders.doubling_budget import DoublingBudget
from shoal.schedule.orders.protocol import Decision, Standing
from shoal.schedule.tracked import Tracked

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
    last one: each then steps about as often as its weight says, at light load those with short requests
    nearly always, and under load batches build up.

    L is what a request takes alone, where that is known. Otherwise it is the mean execution time, which
    includes what was computed for others in the same steps: long prompts of a busy service inflate it, and
    such a service then gets too few turns.

    Ours; doubling budget (SeaLLM) gives who is preempted, and the order within a service. The exponent is
    the result of simulations: 2 gives somewhat lower means and longer tails, 1 the reverse.
    """

    def rank(self, one: Tracked, group: GroupView) -> float:
        """As doubling budget."""
        return _BUDGETS.rank(one, group)

    def urgencies(self, group: GroupView, columns: Columns) -> FloatArray:
        """As doubling budget."""
        return _BUDGETS.urgencies(group, columns)

    def decide(self, standing: Standing, now_ns: int) -> Decision:
        """Every service's turns, by weight and steps since its last."""
        offers: list[Offer] = []
        for group in standing.groups.values():
            if group.running or group.waiting:
                offers += self._turns(self._ranked(group), standing.step - group.last_step)
        offers.sort(key=lambda offer: offer.urgency)
        return Decision([offer.turn for offer in offers])

    def _turns(self, ranked: Ranked, steps: int) -> list[Offer]:
        group = ranked.group
        found = []
        for offer in self.offers(ranked):
            requests = len(group.running) + (1 if offer.turn.prefill and group.waiting else 0)
            urgency = (-steps * weight(group, requests), offer.urgency[1])
            found.append(Offer(urgency, offer.turn))
        return found


def weight(group: GroupView, requests: int) -> float:
    """(N / L^2)^1.5, in 1 / s^3."""
    traits = group.traits
    alone_s = traits.mean_s if traits.alone_s is None else traits.alone_s
    return float((requests / max(alone_s, 1e-9) ** 2) ** EXPONENT)
