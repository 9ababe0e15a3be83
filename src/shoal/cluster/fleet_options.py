"""Options of the fleet: how many engines run, and what decides it."""

from dataclasses import dataclass

from shoal.core import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetOptions:
    """Engines that are not needed go to standby, and come back before they are needed.

    All bounds are aims for the running engines together: more engines are started when one is exceeded.
    """

    min: int = 1
    """Fewest running engines."""
    max: int | None = None
    """Most running engines; None: all."""
    idle_s: float = 60.0
    """An engine goes to standby when fewer have sufficed for this time."""
    kv_share: float = 0.8
    """Share of the KV memory that requests are expected to fill at their end."""
    requests: int | None = None
    """Unfinished requests of an engine; None: no bound."""
    attainment: float | None = None
    """Share of the requests with goals that meet them; None: no bound."""

    def __post_init__(self) -> None:
        """Raises ConfigError for numbers out of range."""
        if self.min < 1:
            raise ConfigError(f"fleet.min must be at least 1, got {self.min}")
        if self.max is not None and self.max < self.min:
            raise ConfigError(f"fleet.max must be at least fleet.min ({self.min}), got {self.max}")
        if not self.idle_s >= 0:
            raise ConfigError(f"fleet.idle must not be negative, got {self.idle_s:g} s")
        if not 0 < self.kv_share <= 1:
            raise ConfigError(f"fleet.kv_share must be in (0, 1], got {self.kv_share:g}")
        if self.requests is not None and self.requests < 1:
            raise ConfigError(f"fleet.requests must be at least 1, or null for no bound, got {self.requests}")
        if self.attainment is not None and not 0 < self.attainment <= 1:
            raise ConfigError(f"fleet.attainment must be in (0, 1], or null, got {self.attainment:g}")
