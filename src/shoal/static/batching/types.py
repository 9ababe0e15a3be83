"""The nouns of static batching: a request between two batches, a batch, and whose it is."""

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class StaticRequest:
    """One request as the batcher sees it; a new value after every batch that it took part in."""

    id: str
    tokens: int
    """Input length of its next batch: prompt and what was generated so far."""
    remaining: int
    """Most output tokens that it may still generate; at least 1."""
    predicted: int
    """Output tokens that it is predicted to generate still, in 1..remaining."""
    slo_s: float | None = None
    """Seconds from arrival to last token that it should end within; None means no goal."""
    arrival_ns: int = 0
    number: int = 0
    """Order of submission."""
    slices: int = 0
    """Batches it has taken part in so far."""

    def __post_init__(self) -> None:
        """Refuse lengths without meaning; raises ValueError."""
        if self.tokens < 1:
            raise ValueError(f"request {self.id!r} needs at least 1 input token, got {self.tokens}")
        if self.remaining < 1:
            raise ValueError(f"request {self.id!r} must have at least 1 token left, got {self.remaining}")
        if not 1 <= self.predicted <= self.remaining:
            raise ValueError(
                f"request {self.id!r}: predicted must be in 1..{self.remaining}, got {self.predicted}"
            )
        if self.slo_s is not None and self.slo_s <= 0:
            raise ValueError(f"request {self.id!r}: slo_s must be above 0, got {self.slo_s}")

    def after(self, generated: int, predicted: int | None = None) -> "StaticRequest":
        """The same request, unfinished, after a batch in which it generated ``generated`` tokens.

        predicted: output tokens still to come, predicted anew. None keeps what is left of the earlier
        prediction; one that the request has outgrown is doubled (S3's way of correcting itself).

        Raises:
            ValueError: more was generated than its limit allowed, or nothing remains of it.
        """
        remaining = self.remaining - generated
        if not (generated >= 0 and remaining > 0):
            raise ValueError(f"request {self.id!r} cannot go on: {generated} of {self.remaining} tokens done")
        if predicted is None:
            predicted = self.predicted - generated if generated < self.predicted else 2 * self.predicted
        return replace(
            self,
            tokens=self.tokens + generated,
            remaining=remaining,
            predicted=max(1, min(predicted, remaining)),
            slices=self.slices + 1,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StaticBatch:
    """Requests that one worker serves together, from their prefill to the last iteration."""

    requests: tuple[StaticRequest, ...]
    """One for each row of the batch."""
    input_tokens: int
    """The longest input; the others are padded to it."""
    iterations: int
    """At most so many tokens are generated for each request (the slice, or the limit)."""
    estimate_s: float
    """Estimated serving time of all those iterations, in seconds."""

    def __len__(self) -> int:
        """Number of requests."""
        return len(self.requests)


@dataclass(frozen=True, slots=True)
class Assignment:
    """A batch and the worker that is to serve it, after those it was given before."""

    worker: int
    """Counted from 0."""
    batch: StaticBatch
    number: int = 0
    """Identifies this assignment; never used twice by one batcher."""
