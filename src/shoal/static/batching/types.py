"""The nouns of static batching: a request between two batches, a batch, and whose it is."""

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class StaticRequest:
    """One request as the batcher sees it; a new value after every batch that it took part in.

    tokens: input length of its next batch: prompt and what was generated so far.
    remaining: most output tokens that it may still generate; at least 1.
    predicted: output tokens that it is believed to generate still, in 1..remaining.
    slo_s: seconds from arrival to last token that it should end within; None means no goal.
    number: order of submission. slices: batches it has taken part in so far.
    """

    id: str
    tokens: int
    remaining: int
    predicted: int
    slo_s: float | None = None
    arrival_ns: int = 0
    number: int = 0
    slices: int = 0

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

        predicted: what is believed of the rest now. None keeps what is left of the earlier belief; a request
        that has outgrown it is believed to go on for twice as long as it was (S3's way of correcting itself).

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
    """Requests that one worker serves together, from their prefill to the last iteration.

    requests: rows of the batch. input_tokens: the longest input; the others are padded to it.
    iterations: at most so many tokens are generated for each (the slice, or the limit).
    estimate_s: believed serving time of all those iterations, in seconds.
    """

    requests: tuple[StaticRequest, ...]
    input_tokens: int
    iterations: int
    estimate_s: float

    def __len__(self) -> int:
        """Number of requests."""
        return len(self.requests)


@dataclass(frozen=True, slots=True)
class Assignment:
    """A batch and the worker (0-based) that is to serve it, after those it was given before.

    number: names this assignment; never used twice by one batcher.
    """

    worker: int
    batch: StaticBatch
    number: int = 0
