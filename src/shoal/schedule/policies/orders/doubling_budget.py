"""Order ``doubling-budget`` (SeaLLM): services with short requests first; long requests drop behind."""

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

    A service's requests get a budget Q = mean + standard deviation of their execution times, which is used up
    by the steps that they take part in. Priority is O = Q_left * mean, the smallest first: by Smith's rule
    that minimizes the mean latency relative to ``mean`` if all requests are present and Q_left is their
    remaining time. A request that has used up its budget gets twice as much, and thereby drops behind.

    Variants:
        ``join``: the smallest O picks the service, whose running and waiting requests then step together.
        ``literal``, the paper's: the smallest O picks the service and the phase; waiting requests and prompts
        step without the decodes, and the decodes without them. Running requests have less budget left than
        waiting ones, so a batch tends to drain before requests join it.
        ``batch``: as ``join``, with O divided by the number of requests that a step of the service could
        serve (waiting and running, at most ``max_batch``), since they share the step.
        ``c-mu``: as ``join``, with the expected remaining time in place of Q_left (Theorem 2), given the
        progress and the lengths of past outputs; as ``join`` before the first request has finished.
    """

    variant: str = "join"
    """See above."""
    max_batch: int = 64
    """For the variant ``batch``."""

    def __post_init__(self) -> None:
        require_one_of(self.variant, "doubling-budget", "variant", VARIANTS)
        require(self.max_batch >= 1, "doubling-budget", "max_batch", "must be at least 1", self.max_batch)

    def rank(self, request: RequestState, view: ServiceView) -> float:
        """Budget left as a share of the first one, so that drifting estimates do not reorder new requests."""
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
        """Turns with all requests of a service, or with ``literal`` one for each phase."""
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
    """The first budget of a request in nanoseconds, at least 1."""
    return max(1, min(round((traits.mean_s + traits.deviation_s) * 1e9), LONGEST_NS))


def budget_left(service_time_ns: int, budget_ns: int) -> int:
    """What is left of a request's current budget.

    Budgets are Q, 2Q, 4Q, ...; they are used up after a total service time of Q, 3Q, 7Q, ...
    """
    number = (service_time_ns // budget_ns + 1).bit_length()
    return (budget_ns << number) - budget_ns - service_time_ns


def _budgets_left(service_time_ns: IntArray, budget_ns: int) -> IntArray:
    """``budget_left`` of many requests."""
    numbers = POWERS.searchsorted(service_time_ns // budget_ns + 1, side="right")
    return POWERS.take(numbers) * budget_ns - budget_ns - service_time_ns


def _expected_remaining(view: ServiceView, table: RequestTable) -> FloatArray:
    """Expected output tokens still to come, from past requests that were at least as long."""
    generated = table.num_generated
    return view.lengths().mean_beyond(generated, table.max_new_tokens) - generated
