"""Doubling budget: services with short requests first, requests that outlast their budget later."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shoal.schedule.group import GroupView, ServiceTraits
from shoal.schedule.orders.by_priority import ByPriority, Offer, Ranked, require, require_one_of
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

    def priorities(self, group: GroupView, requests: Sequence[Tracked]) -> Sequence[float]:
        """O, in seconds squared."""
        traits = group.traits
        if self.variant == "c-mu" and traits.mean_output_tokens is not None:
            weight = traits.mean_s * traits.mean_s / traits.mean_output_tokens
            return [tokens * weight for tokens in _expected_remaining(group, requests)]
        weight = traits.mean_s / 1e9
        if self.variant == "batch":
            weight /= max(1, min(self.max_batch, len(group.waiting) + len(group.running)))
        budget_ns = budget_of(traits)
        charges = [one.charged_ns for one in requests]
        if not charges or max(charges) < budget_ns:
            return [(budget_ns - charged) * weight for charged in charges]
        return [
            (budget_ns - charged if charged < budget_ns else budget_left(charged, budget_ns)) * weight
            for charged in charges
        ]

    def offers(self, ranked: Ranked) -> list[Offer]:
        """Turns with all of a service, or in ``literal`` one for each phase."""
        if self.variant != "literal":
            return ByPriority.offers(self, ranked)
        service, waiting = ranked.group.service, ranked.group.waiting
        offers = []
        if ranked.prompt_urgency is not None:
            turn = Turn(service, ranked.prompts, waiting, prefill=True)
            offers.append(Offer(ranked.prompt_urgency, turn))
        if ranked.decode_urgency is not None:
            offers.append(Offer(ranked.decode_urgency, Turn(service, ranked.decodes)))
        return offers


def budget_of(traits: ServiceTraits) -> int:
    """A fresh request's budget in nanoseconds, at least one."""
    return max(1, round((traits.mean_s + traits.deviation_s) * 1e9))


def budget_left(charged_ns: int, budget_ns: int) -> int:
    """What is left of the budget that a request is on.

    Budgets are Q, 2Q, 4Q, ...; they are used up when Q, 3Q, 7Q, ... have been charged in all.
    """
    number = (charged_ns // budget_ns + 1).bit_length()
    return (budget_ns << number) - budget_ns - charged_ns


def _expected_remaining(group: GroupView, requests: Sequence[Tracked]) -> list[float]:
    """Output tokens still to come, on average over past requests that got as far."""
    generated = np.array([one.generated for one in requests], dtype=np.int64)
    ceilings = np.array([one.ceiling for one in requests], dtype=np.int64)
    expected = group.crowd().lengths.mean_beyond(generated, ceilings)
    remaining: list[float] = (expected - generated).tolist()
    return remaining
