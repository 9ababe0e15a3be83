"""Options of batching: how the cluster forms batches of waiting requests (SCLS, UELLM, S3)."""

from dataclasses import dataclass

from shoal.batches import FORMERS
from shoal.core import ConfigError, lookup
from shoal.forecast import PREDICTORS


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchingOptions:
    """How waiting requests of a service become batches, and when; the dispatch policy chooses their engines.

    With the scheduler's admission ``batch`` an engine runs one batch of a service after another; with any
    other, a batch is only sent together.
    """

    former: str = "fixed"
    """Which requests share a batch; one of ``FORMERS``."""
    interval_s: float | None = None
    """Shortest time between two formations. None: an engine without requests of the service gets a batch."""
    load_factor: float = 0.0
    """The interval is at least this share of the least loaded engine's estimated work (SCLS's lambda): the
    more work there is, the longer requests gather."""
    slice_tokens: int | None = None
    """Output tokens of a request in one batch, after which it waits for another. None: until it ends."""
    max_batch: int | None = None
    """Maximum requests in a batch; None: as many as fit in memory."""
    trust_predictions: bool = False
    """Length and memory of a batch follow from predicted output lengths, not from limits. A request that
    outgrows its batch waits for another."""
    longest_first: bool = False
    """Batches are dispatched in falling order of their estimated times, else in the order of the former."""
    lengths: str = "history"
    """Predictor of output lengths, one of ``PREDICTORS``."""
    memory_share: float = 0.9
    """Share of an engine's KV memory that a batch may fill (SCLS's zeta)."""

    def __post_init__(self) -> None:
        """Raises ConfigError for unknown names and numbers out of range."""
        lookup("batch former", FORMERS, self.former)
        lookup("batching lengths", PREDICTORS, self.lengths)
        if self.interval_s is not None and not self.interval_s > 0:
            raise ConfigError(f"batching.interval must be above 0, or when-idle, got {self.interval_s:g} s")
        if not 0 <= self.load_factor < 1:
            raise ConfigError(f"batching.load_factor must be in [0, 1), got {self.load_factor:g}")
        if self.load_factor and self.interval_s is None:
            raise ConfigError(
                f"batching.load_factor ({self.load_factor:g}) lengthens an interval: write a time for "
                "batching.interval, or load_factor: 0"
            )
        for name in ("slice_tokens", "max_batch"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"batching.{name} must be at least 1, or null for no limit, got {value}")
        if not 0 < self.memory_share <= 1:
            raise ConfigError(f"batching.memory_share must be in (0, 1], got {self.memory_share:g}")

    @property
    def limits_iterations(self) -> bool:
        """Whether a batch may end before its requests do."""
        return self.slice_tokens is not None or self.trust_predictions
