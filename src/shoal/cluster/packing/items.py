"""Items (running requests) and bins (device groups) of the packing problem."""

from dataclasses import dataclass

from shoal.core import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceGroup:
    """The devices of one engine: a bin. All sizes are in one unit, KV tokens or bytes."""

    name: str
    capacity: int
    services: frozenset[str] | None = None
    """None: all."""
    host: str = ""
    """The machine; moves within one are cheap."""

    def __post_init__(self) -> None:
        """Raises ConfigError for a group without memory."""
        if self.capacity < 1:
            raise ConfigError(f"device group {self.name}: capacity must be at least 1, got {self.capacity}")

    def hosts(self, service: str) -> bool:
        return self.services is None or service in self.services


@dataclass(slots=True, kw_only=True)
class Item:
    """A running request. Only ``Packing`` changes it."""

    id: str
    service: str
    size: int
    """KV that it holds, or will hold before the next operations."""
    expected: int
    """Expected final size; at least ``size``."""
    group: str | None = None
    """Its group; None: new, or between two groups."""
    home: str | None = None
    """Its last group; None: new."""
    stays: bool = False
    """Whether it must not move now."""

    @property
    def growth(self) -> int:
        """Expected further growth."""
        return self.expected - self.size
