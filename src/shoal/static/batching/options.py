"""What can be chosen about static batching."""

from dataclasses import dataclass

from shoal.core import ConfigError
from shoal.static.batching.forming import BatchFormer
from shoal.static.batching.interval import Interval
from shoal.static.batching.offload import Offloader


@dataclass(frozen=True, slots=True, kw_only=True)
class StaticOptions:
    """Options of a ``GlobalBatcher``; the published combinations are in ``STATIC_PRESETS``."""

    former: BatchFormer
    """Divides requests into batches."""
    offloader: Offloader
    """Places batches on workers."""
    interval: Interval
    """When batches are formed."""
    slice_tokens: int | None = None
    """Most tokens generated for a request in one batch, after which it returns to the pool.

    None: a batch runs until all its requests end.
    """
    max_batch: int | None = None
    """Most requests in one batch; None: as many as the memory holds."""
    trust_predictions: bool = False
    """A batch runs for the longest prediction in it, not for the longest limit.

    Memory is then reserved for that only; a request that outgrows its batch returns to the pool.
    """

    def __post_init__(self) -> None:
        """Refuse numbers without meaning; raises ConfigError."""
        for name in ("slice_tokens", "max_batch"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, or left out for no limit, got {value}")
