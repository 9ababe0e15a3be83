"""Doubling budget: services with short requests first, requests that outlast their budget later."""

from dataclasses import dataclass

from shoal.schedule.columns import Columns
from shoal.schedule.group import GroupView, ServiceTraits
from shoal.schedule.members import IntArray
from shoal.schedule.orders.by_priority import (
    LONGEST_NS,
    POWERS,
    ByPriority,
    FloatArray,
    Offer,
    Ranked,
    require,
    require_one_of,
)
from shoal.schedule.orders.protocol import Turn
from shoal.schedule.tracked import Tracked

VARIANTS = ("join", "literal", "batch", "c-mu")


@dataclass(frozen=True, slots=True, kw_only=True)
class DoublingBudget(ByPriority):
    """SeaLLM's order (section 4.2, Algorithm 2 in appendix A.2).

    A service's requests get a budget Q = mean + standard deviation of their execution times, which the steps
    that they take part in use up. Priority is O = Q_left * mean, the smallest first: by Smith's rule that
    minimises the mean latency relative to ``mean`` if all are there at once and Q_left is what remains. A
    request that has used up its budget gets twice as much, and thereby drops behind.

    variant:
        ``join``: the smallest O picks the service, all of which then step together, newcomers joining.
        ``literal``, the paper's: it picks the service and the phase; those who wait (or are within their
        prompt) step without the decodes and the decodes without them. Running requests have less left than
        newcomers, so a batch tends to drain before anybody joins it.
        ``batch``: as ``join``, O divided by how many requests a step of the service could serve at once (its
        waiting and running ones, at most ``max_batch``): a step is shared by all of them.
        ``c-mu``: as ``join``, with the expected remaining time given the progress in place of Q_left (Theorem
        2), from the lengths of past outputs; as ``join`` where none has finished yet.
    """

    variant: str = "join"
    max_batch: int = 64

    def __post_init__(self) -> None:
        """Refuse knobs without meaning; raises ConfigError."""
        require_one_of(self.variant, "doubling-budget", "variant", VARIANTS)
        require(self.max_batch >= 1, "doubling-budget", "max_batch", "must be at least 1", self.max_batch)

    def rank(self, one: Tracked, group: GroupView) -> float:
        """Budget left as a share of the first one: beliefs that drift do not reorder fresh requests."""
        budget_ns = budget_of(group.traits)
        return budget_left(one.charged_ns, budget_ns) / budget_ns

    def urgencies(self, group: GroupView, columns: Columns) -> FloatArray:
        """O, in seconds squared."""
        traits = group.traits
        if self.variant == "c-mu" and traits.mean_output_tokens is not None:
            weight = traits.mean_s * traits.mean_s / traits.mean_output_tokens
            return _expected_remaining(group, columns) * weight
        weight = traits.mean_s / 1e9
        if self.variant == "batch":
            weight /= max(1, min(self.max_batch, len(group.waiting) + len(group.running)))
        return _budgets_left(columns.charged_ns, budget_of(traits)) * weight

    def offers(self, ranked: Ranked) -> list[Offer]:
        """Turns with all of a service, or in ``literal`` one for each phase."""
        if self.variant != "literal":
            return ByPriority.offers(self, ranked)
        service, waiting = ranked.group.service, ranked.group.waiting
        begun = set(ranked.group.prefills)
        offers = []
        if ranked.prompt_urgency is not None:
            prompts = [one for one in ranked.running if one in begun]
            offers.append(Offer(ranked.prompt_urgency, Turn(service, prompts, waiting, prefill=True)))
        if ranked.decode_urgency is not None:
            decodes = [one for one in ranked.running if one not in begun]
            offers.append(Offer(ranked.decode_urgency, Turn(service, decodes)))
        return offers


def budget_of(traits: ServiceTraits) -> int:
    """A fresh request's budget in nanoseconds, at least one."""
    return max(1, min(round((traits.mean_s + traits.deviation_s) * 1e9), LONGEST_NS))


def budget_left(charged_ns: int, budget_ns: int) -> int:
    """What is left of the budget that a request is on.

    Budgets are Q, 2Q, 4Q, ...; they are used up when Q, 3Q, 7Q, ... have been charged in all.
    """
    number = (charged_ns // budget_ns + 1).bit_length()
    return (budget_ns << number) - budget_ns - charged_ns


def _budgets_left(charged_ns: IntArray, budget_ns: int) -> IntArray:
    """``budget_left`` of many requests."""
    numbers = POWERS.searchsorted(charged_ns // budget_ns + 1, side="right")
    return POWERS.take(numbers) * budget_ns - budget_ns - charged_ns


def _expected_remaining(group: GroupView, columns: Columns) -> FloatArray:
    """Output tokens still to come, on average over past requests that got as far."""
    generated = columns.generated
    return group.crowd().lengths.mean_beyond(generated, columns.ceilings) - generated
