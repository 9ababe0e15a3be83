"""What batch formers see of a waiting request, and a batch that they formed."""

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class PooledRequest:
    """A waiting request, as batch formers see it; after a batch it is a new value (``after``).

    Raises ValueError for lengths out of range.
    """

    id: str
    tokens: int
    """Input length in the next batch: prompt and output so far."""
    remaining: int
    """Maximum of further output tokens, at least 1."""
    predicted: int
    """Predicted further output tokens, in 1..remaining."""
    slo_s: float | None = None
    """Goal of end-to-end latency; None: no goal."""
    arrival_ns: int = 0
    number: int = 0
    """Order of submission."""
    output_tokens: int = 0
    """Output so far, part of ``tokens``."""
    slices: int = 0
    """Batches so far."""

    def __post_init__(self) -> None:
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

    def after(self, generated: int, predicted: int | None = None) -> "PooledRequest":
        """The unfinished request after a batch that generated ``generated`` of its tokens.

        predicted: a new prediction of further output tokens. None: the rest of the earlier prediction, or
        twice the prediction if the request has outgrown it (as in S3).

        Raises:
            ValueError: the request has reached or exceeded its limit.
        """
        remaining = self.remaining - generated
        if not (generated >= 0 and remaining > 0):
            raise ValueError(f"request {self.id!r} cannot go on: {generated} of {self.remaining} tokens done")
        if predicted is None:
            predicted = self.predicted - generated if generated < self.predicted else 2 * self.predicted
        return replace(
            self,
            tokens=self.tokens + generated,
            output_tokens=self.output_tokens + generated,
            remaining=remaining,
            predicted=max(1, min(predicted, remaining)),
            slices=self.slices + 1,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestBatch:
    """Requests that one engine serves together, from prefill to the last iteration."""

    requests: tuple[PooledRequest, ...]
    """One for each row."""
    input_tokens: int
    """The longest input; an engine of padded batches pads the others to it."""
    iterations: int
    """Maximum tokens generated for each request."""
    estimate_s: float
    """Estimated serving time of all iterations."""

    def __len__(self) -> int:
        return len(self.requests)
