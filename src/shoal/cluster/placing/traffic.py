"""The traffic of the present interval: requests to replay in a search, and what those that ended got."""

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import fmean

from shoal.core import NO_GOALS, SLO, FinishReason, Request, RequestRecord
from shoal.core.slo import met
from shoal.place.estimate import Estimate, ServiceEstimate

MOST_REQUESTS = 2000
"""The latest requests of an interval that are kept; earlier ones are left out of a search."""


@dataclass(frozen=True, slots=True)
class ReplayedRequest:
    """One choice of a call as it came, to be simulated."""

    service: str
    arrival_ns: int
    prompt_tokens: int
    most_tokens: int
    """Its output limit."""
    output_tokens: int
    """The length of its output; of an unfinished one the mean of its service."""
    slo: SLO = NO_GOALS
    """Its resolved goals."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceFacts:
    """One service in one interval."""

    arrived: int = 0
    """Choices of calls that came in it."""
    ended: int = 0
    """Choices that ended in it, without those that clients cancelled."""
    unserved: int = 0
    """Those of them that missed a goal, failed or were refused."""
    answered: int = 0
    """Those of them that finished."""
    latency_s: float = 0.0
    """Sum of the end-to-end latencies of these."""

    @property
    def attainment(self) -> float:
        """Share of those that ended which met their goals; 1 if none ended."""
        return 1 - self.unserved / self.ended if self.ended else 1.0

    @property
    def mean_latency_s(self) -> float | None:
        return self.latency_s / self.answered if self.answered else None


@dataclass(frozen=True, slots=True, kw_only=True)
class IntervalFacts:
    """What came and ended in an interval."""

    length_s: float
    services: Mapping[str, ServiceFacts]
    """Of every service that is served."""
    requests: tuple[ReplayedRequest, ...] = ()
    """The latest that came, by arrival."""
    window_s: float = 0.0
    """How long they took to come."""

    def achieved(self, execution_s: Mapping[str, float]) -> Estimate:
        """What ended, as searches estimate it; execution_s: L^, the time of a mean request alone, by service.

        The latency of a service without it counts as 0.
        """
        estimates = {}
        for name, facts in self.services.items():
            alone_s = execution_s.get(name)
            normalised = facts.latency_s / alone_s if alone_s else 0.0
            estimates[name] = ServiceEstimate(facts.ended, facts.unserved, facts.answered, normalised)
        return Estimate(estimates)


@dataclass(slots=True)
class _Arrived:
    """A choice that came, and how far it is."""

    service: str
    arrival_ns: int
    prompt_tokens: int
    most_tokens: int
    slo: SLO
    output_tokens: int = 0
    ended: bool = False


class Traffic:
    """Counts requests as they come and end, and keeps the latest."""

    def __init__(self, now_ns: int, most: int = MOST_REQUESTS) -> None:
        self._begin_ns = now_ns
        self._came: deque[_Arrived] = deque(maxlen=most)
        self._left_out = False
        self._unfinished: dict[tuple[str, int], _Arrived] = {}
        self._facts: dict[str, dict[str, float]] = {}

    def arrived(self, call: str, request: Request, choices: Iterable[int], slo: SLO) -> None:
        """A call came. request: of its first choice. slo: its resolved goals."""
        for choice in choices:
            self._left_out |= len(self._came) == self._came.maxlen
            most = request.sampling.max_tokens or 1
            came = _Arrived(request.service, request.arrival_ns, len(request.prompt), most, slo)
            self._came.append(came)
            self._unfinished[call, choice] = came
            self._count(request.service, arrived=1)

    def ended(
        self, call: str, choice: int, finish: FinishReason, output_tokens: int, record: RequestRecord | None
    ) -> None:
        """A choice ended. record: its times; None: it did not finish."""
        came = self._unfinished.pop((call, choice), None)
        if came is None:
            return
        came.ended, came.output_tokens = True, output_tokens
        service = came.service
        if record is not None:
            missed = met(record, came.slo) is False
            self._count(service, ended=1, unserved=missed, answered=1, latency_s=record.e2e_s)
        elif finish is not FinishReason.CANCELLED and finish is not FinishReason.INVALID:
            self._count(service, ended=1, unserved=1)

    def facts(self, services: Iterable[str], now_ns: int) -> IntervalFacts:
        """The interval up to now."""
        return IntervalFacts(
            length_s=(now_ns - self._begin_ns) / 1e9,
            services={name: _service_facts(self._facts.get(name, {})) for name in services},
            requests=self._replayed(),
            window_s=self._window_s(now_ns),
        )

    def begin(self, now_ns: int) -> None:
        """A new interval begins now."""
        self._begin_ns, self._left_out = now_ns, False
        self._came.clear()
        self._facts.clear()

    def _count(self, service: str, **more: float) -> None:
        counts = self._facts.setdefault(service, {})
        for name, value in more.items():
            counts[name] = counts.get(name, 0) + value

    def _replayed(self) -> tuple[ReplayedRequest, ...]:
        outputs: dict[str, list[int]] = {}
        for came in self._came:
            if came.ended and came.output_tokens:
                outputs.setdefault(came.service, []).append(came.output_tokens)
        means = {service: round(fmean(tokens)) for service, tokens in outputs.items()}
        return tuple(_replayed(came, means) for came in self._came)

    def _window_s(self, now_ns: int) -> float:
        begin_ns = self._came[0].arrival_ns if self._left_out else self._begin_ns
        return max(1e-3, (now_ns - begin_ns) / 1e9)


def _replayed(came: _Arrived, means: Mapping[str, int]) -> ReplayedRequest:
    tokens = came.output_tokens if came.ended else means.get(came.service, 1)
    return ReplayedRequest(
        service=came.service,
        arrival_ns=came.arrival_ns,
        prompt_tokens=came.prompt_tokens,
        most_tokens=came.most_tokens,
        output_tokens=max(1, min(came.most_tokens, tokens)),
        slo=came.slo,
    )


def _service_facts(counts: Mapping[str, float]) -> ServiceFacts:
    whole = {name: int(value) for name, value in counts.items() if name != "latency_s"}
    return ServiceFacts(**whole, latency_s=counts.get("latency_s", 0.0))
