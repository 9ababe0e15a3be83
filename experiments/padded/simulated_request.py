"""An unfinished request of a simulated static engine, and the limits checked on arrival."""

from dataclasses import dataclass

from shoal.batches import PooledRequest
from shoal.core import NO_GOALS, SLO, InvalidRequest, LengthPredictor, Request, resolve_slo
from shoal.measure.records import RequestRow


@dataclass(frozen=True, slots=True, kw_only=True)
class StaticLimits:
    """Limits of requests, and goals of the service."""

    context_tokens: int
    """Maximum tokens of prompt and output."""
    slo: SLO = NO_GOALS
    """Goals of requests without their own."""
    execution_s: float | None = None
    """The time that ``SLO.e2e_scale`` multiplies."""

    def output_limit(self, request: Request) -> int:
        """Maximum output tokens; raises InvalidRequest if the request does not fit in the context."""
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
        return resolve_slo(request.slo, self.slo, self.execution_s)


@dataclass(slots=True)
class SimulatedRequest:
    """A request with its progress."""

    request: Request
    max_new_tokens: int
    output_length: int
    """Output tokens that it will have in the end."""
    goals: SLO
    static_request: PooledRequest
    """The current value for the batcher."""
    generated: int = 0
    """Output tokens so far."""
    batches: int = 0
    """Batches so far."""
    recomputed_tokens: int = 0
    """Input tokens that an earlier batch had computed."""
    first_token_ns: int | None = None
    last_token_ns: int = 0
    largest_gap_ns: int = 0
    """Longest time between the tokens of two batches."""

    @classmethod
    def open(
        cls, request: Request, number: int, limits: StaticLimits, predictor: LengthPredictor | None
    ) -> "SimulatedRequest":
        """Make one from a request that arrives; number: order of submission.

        Raises:
            InvalidRequest: the request does not fit in the context, or has no ``true_output_tokens``.
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
        static_request = PooledRequest(
            id=request.id,
            tokens=len(request.prompt),
            remaining=limit,
            predicted=limit if predictor is None else predictor.predict(request, 0, limit),
            slo_s=goals.e2e_s,
            arrival_ns=request.arrival_ns,
            number=number,
        )
        return cls(request, limit, min(true, limit), goals, static_request)

    @property
    def remaining(self) -> int:
        """Output tokens to come."""
        return self.output_length - self.generated

    def add_batch(self, output: int, now_ns: int, predictor: LengthPredictor | None) -> bool:
        """Add the output tokens of a batch that ended now; returns whether the request has ended.

        As in ``OpenRequest``, a new prediction is made only if the request has outgrown the last one.
        """
        if self.batches:
            self.recomputed_tokens += self.static_request.tokens
            self.largest_gap_ns = max(self.largest_gap_ns, now_ns - self.last_token_ns)
        self.batches += 1
        self.generated += output
        self.first_token_ns = now_ns if self.first_token_ns is None else self.first_token_ns
        self.last_token_ns = now_ns
        if self.generated == self.output_length:
            if predictor is not None:
                predictor.record(self.request, self.generated)
            return True
        predicted = None
        if predictor is not None and output >= self.static_request.predicted:
            predicted = predictor.predict(self.request, self.generated, self.max_new_tokens) - self.generated
        self.static_request = self.static_request.after(output, predicted)
        return False

    def row(self, worker: int) -> RequestRow:
        """The record of an ended request; worker: the one that served it last."""
        assert self.first_token_ns is not None
        true = self.request.true_output_tokens
        return RequestRow(
            request_id=self.request.id,
            service=self.request.service,
            arrival_ns=self.request.arrival_ns,
            first_token_ns=self.first_token_ns,
            finish_ns=self.last_token_ns,
            prompt_tokens=len(self.request.prompt),
            output_tokens=self.generated,
            engine=worker,
            finish="stop" if true is not None and true <= self.max_new_tokens else "length",
            recomputed_tokens=self.recomputed_tokens,
            largest_gap_ns=self.largest_gap_ns,
            slo=self.goals,
        )


def rejected_row(request: Request, reason: str) -> RequestRow:
    """The record of a request that was refused on arrival."""
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
