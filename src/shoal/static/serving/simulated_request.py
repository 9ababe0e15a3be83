"""One request on its way through simulated static batches."""

from dataclasses import dataclass

from shoal.core import NO_GOALS, SLO, InvalidRequest, LengthPredictor, Request, resolve_slo
from shoal.measure.records import RequestRow
from shoal.static.batching import StaticRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class StaticLimits:
    """What requests are measured against before they enter the pool.

    context_tokens: most tokens of prompt and output. slo: goals of requests without their own.
    execution_s: the time that ``SLO.e2e_scale`` multiplies.
    """

    context_tokens: int
    slo: SLO = NO_GOALS
    execution_s: float | None = None

    def output_limit(self, request: Request) -> int:
        """Most output tokens of ``request``; raises InvalidRequest if it does not fit in the context."""
        room = self.context_tokens - len(request.prompt)
        limit = room if request.sampling.max_tokens is None else request.sampling.max_tokens
        if not 1 <= limit <= room:
            raise InvalidRequest(
                f"request {request.id!r}: {len(request.prompt)} prompt tokens and up to {limit} output "
                f"tokens do not fit in a context of {self.context_tokens}; ask for at most {max(0, room)}",
                param="max_tokens",
                code="context_length_exceeded",
            )
        return limit

    def goals(self, request: Request) -> SLO:
        """The resolved goals of ``request``."""
        return resolve_slo(request.slo, self.slo, self.execution_s)


@dataclass(slots=True)
class SimulatedRequest:
    """A request that has no answer yet; the owner of its progress.

    limit: most output tokens it may have. length: those it will have. place: what the batcher knows of it.
    done: output tokens so far. last_ns: when the latest of them arrived.
    """

    request: Request
    limit: int
    length: int
    goals: SLO
    place: StaticRequest
    done: int = 0
    batches: int = 0
    recomputed: int = 0
    first_ns: int | None = None
    last_ns: int = 0
    largest_gap_ns: int = 0

    @classmethod
    def open(
        cls, request: Request, number: int, limits: StaticLimits, predictor: LengthPredictor | None
    ) -> "SimulatedRequest":
        """A request that has just arrived; number: its place among those submitted.

        Raises:
            InvalidRequest: it does not fit in the context, or does not say how long its output will be.
        """
        limit = limits.output_limit(request)
        true = request.true_output_tokens
        if true is None or true < 1:
            raise InvalidRequest(
                f"request {request.id!r} must know its output length of at least 1 token "
                f"(true_output_tokens) to be simulated, got {true}",
                param="true_output_tokens",
            )
        goals = limits.goals(request)
        place = StaticRequest(
            id=request.id,
            tokens=len(request.prompt),
            remaining=limit,
            predicted=limit if predictor is None else predictor.predict(request, 0, limit),
            slo_s=goals.e2e_s,
            arrival_ns=request.arrival_ns,
            number=number,
        )
        return cls(request, limit, min(true, limit), goals, place)

    @property
    def left(self) -> int:
        """Output tokens that it will still generate."""
        return self.length - self.done

    def take(self, output: int, now_ns: int, predictor: LengthPredictor | None) -> bool:
        """A batch that ended now generated ``output`` tokens for it; whether that was all.

        Beliefs change as in ``OpenRequest``: only a request that has outgrown its prediction is
        predicted anew.
        """
        if self.batches:
            self.recomputed += self.place.tokens
            self.largest_gap_ns = max(self.largest_gap_ns, now_ns - self.last_ns)
        self.batches += 1
        self.done += output
        self.first_ns = now_ns if self.first_ns is None else self.first_ns
        self.last_ns = now_ns
        if self.done == self.length:
            if predictor is not None:
                predictor.record(self.request, self.done)
            return True
        predicted = None
        if predictor is not None and output >= self.place.predicted:
            predicted = predictor.predict(self.request, self.done, self.limit) - self.done
        self.place = self.place.after(output, predicted)
        return False

    def row(self, worker: int) -> RequestRow:
        """What it experienced, once it has ended; worker: who served it last."""
        assert self.first_ns is not None
        true = self.request.true_output_tokens
        return RequestRow(
            request_id=self.request.id,
            service=self.request.service,
            arrival_ns=self.request.arrival_ns,
            first_token_ns=self.first_ns,
            finish_ns=self.last_ns,
            prompt_tokens=len(self.request.prompt),
            output_tokens=self.done,
            engine=worker,
            finish="stop" if true is not None and true <= self.limit else "length",
            recomputed_tokens=self.recomputed,
            largest_gap_ns=self.largest_gap_ns,
            slo=self.goals,
        )


def refused_row(request: Request, reason: str) -> RequestRow:
    """The row of a request that was turned away on arrival."""
    return RequestRow(
        request_id=request.id,
        service=request.service,
        arrival_ns=request.arrival_ns,
        first_token_ns=request.arrival_ns,
        finish_ns=request.arrival_ns,
        prompt_tokens=len(request.prompt),
        output_tokens=0,
        engine=-1,
        finish="refused",
        error=reason,
        slo=request.slo,
    )
