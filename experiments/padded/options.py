"""Options of static batching: former, offloader, interval, slice length, batch size."""

from dataclasses import dataclass

from experiments.padded.interval import Interval
from experiments.padded.offload import Offloader
from shoal.batches.forming import BatchFormer
from shoal.core import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class StaticOptions:
    """Options of a ``GlobalBatcher``; ``STATIC_PRESETS`` has the published combinations.

    Raises ConfigError for numbers out of range.
    """

    former: BatchFormer
    offloader: Offloader
    interval: Interval
    slice_tokens: int | None = None
    """Maximum tokens of a request in one batch, after which it returns to the pool.

    None: a batch runs until all its requests end.
    """
    max_batch: int | None = None
    """Maximum requests in one batch; None: as many as fit in memory."""
    trust_predictions: bool = False
    """Iterations and memory of a batch follow from predicted output lengths, not from limits.

    A request that outgrows its batch returns to the pool.
    """

    def __post_init__(self) -> None:
        for name in ("slice_tokens", "max_batch"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, or left out for no limit, got {value}")
