"""Doubling budget: services with short requests first, requests that outlast their budget later."""

from dataclasses import dataclass

from shoal.schedule.policies.orders.by_priority import (
    LONGEST_NS,
    POWERS,
    ByPriority,
    Candidates,
    Priority,
    require,
    require_one_of,
)
from shoal.schedule.policies.orders.protocol import Turn
from shoal.schedule.policies.view import ServiceTraits, ServiceView
from shoal.schedule.request_state import RequestState
from shoal.schedule.running_batch import FloatArray, IntArray, RequestTable

VARIANTS = ("join", "literal", "batch", "c-mu")


@dataclass(frozen=True, slots=True, kw_only=True)
class DoublingBudget(ByPriority):
    """SeaLLM's order (section 4.2, Algorithm 2 in appendix A.2).

    A service's requests get a budget Q = mean + standard deviation of their execution times, which the steps
    that they take part in use up. Priority is O = Q_left * mean, the smallest first: by Smith's rule that
    minimises the mean latency relative to ``mean`` if all are there at once and Q_left is what remains. A
    request that has used up its budget gets twice as much, and thereby drops behind.

    Variants:
        ``join``: the smallest O picks the service, all of which then step together, those who wait joining.
        ``literal``, the paper's: it picks the service and the phase; those who wait (or are within their
        prompt) step without the decodes and the decodes without them. Running requests have less left than
        those who wait, so a batch tends to drain before anybody joins it.
        ``batch``: as ``join``, O divided by how many requests a step of the service could serve at once (its
        waiting and running ones, at most ``max_batch``): a step is shared by all of them.
        ``c-mu``: as ``join``, with the expected remaining time given the progress in place of Q_left (Theorem
        2), from the lengths of past outputs; as ``join`` where none has finished yet.
    """

    variant: str = "join"
    """One of those above."""
    max_batch: int = 64
    """Of the variant ``batch``."""

    def __post_init__(self) -> None:
        """Refuse knobs without meaning; raises ConfigError."""
        require_one_of(self.variant, "doubling-budget", "variant", VARIANTS)
        require(self.max_batch >= 1, "doubling-budget", "max_batch", "must be at least 1", self.max_batch)

    def rank(self, request: RequestState, view: ServiceView) -> float:
        """Budget left as a share of the first one: estimates that drift do not reorder fresh requests."""
        budget_ns = budget_of(view.traits)
        return budget_left(request.service_time_ns, budget_ns) / budget_ns

    def keys(self, view: ServiceView, table: RequestTable) -> FloatArray:
        """O, in seconds squared."""
        traits = view.traits
        if self.variant == "c-mu" and traits.mean_output_tokens is not None:
            weight = traits.mean_s * traits.mean_s / traits.mean_output_tokens
            return _expected_remaining(view, table) * weight
        weight = traits.mean_s / 1e9
        if self.variant == "batch":
            weight /= max(1, min(self.max_batch, len(view.waiting) + len(view.running)))
        return _budgets_left(table.service_time_ns, budget_of(traits)) * weight

    def turns(self, candidates: Candidates) -> list[tuple[Priority, Turn]]:
        """Turns with all of a service, or in ``literal`` one for each phase."""
        if self.variant != "literal":
            return ByPriority.turns(self, candidates)
        service, waiting = candidates.view.service, candidates.view.waiting
        prefilling = candidates.view.running.prefilling != 0
        turns = []
        if candidates.prompt is not None:
            prompts = candidates.seq_ids[prefilling], candidates.keys[prefilling]
            turns.append((candidates.prompt, Turn(service, *prompts, waiting, prefill=True)))
        if candidates.decode is not None:
            decodes = candidates.seq_ids[~prefilling], candidates.keys[~prefilling]
            turns.append((candidates.decode, Turn(service, *decodes)))
        return turns


def budget_of(traits: ServiceTraits) -> int:
    """A fresh request's budget in nanoseconds, at least one."""
    return max(1, min(round((traits.mean_s + traits.deviation_s) * 1e9), LONGEST_NS))


def budget_left(service_time_ns: int, budget_ns: int) -> int:
    """What is left of the budget that a request is on.

    Budgets are Q, 2Q, 4Q, ...; they are used up when Q, 3Q, 7Q, ... nanoseconds of service are used in all.
    """
    number = (service_time_ns // budget_ns + 1).bit_length()
    return (budget_ns << number) - budget_ns - service_time_ns


def _budgets_left(service_time_ns: IntArray, budget_ns: int) -> IntArray:
    """``budget_left`` of many requests."""
    numbers = POWERS.searchsorted(service_time_ns // budget_ns + 1, side="right")
    return POWERS.take(numbers) * budget_ns - budget_ns - service_time_ns


def _expected_remaining(view: ServiceView, table: RequestTable) -> FloatArray:
    """Output tokens still to come, on average over past requests that got as far."""
    generated = table.num_generated
    return view.lengths().mean_beyond(generated, table.max_new_tokens) - generated
