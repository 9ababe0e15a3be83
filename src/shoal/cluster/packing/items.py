"""What is packed, and into what."""

from dataclasses import dataclass

from shoal.core import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceGroup:
    """Devices that hold one engine: a bin. Sizes are in one unit throughout, tokens of KV or bytes."""

    name: str
    """Unique among the groups."""
    capacity: int
    """Memory for KV."""
    services: frozenset[str] | None = None
    """Services that it hosts; None hosts all."""
    host: str = ""
    """The machine; moves inside one are short."""

    def __post_init__(self) -> None:
        """Raise ConfigError for a group that can hold nothing."""
        if self.capacity < 1:
            raise ConfigError(f"device group {self.name}: capacity must be at least 1, got {self.capacity}")

    def hosts(self, service: str) -> bool:
        """Whether requests of ``service`` may be here."""
        return self.services is None or service in self.services


@dataclass(slots=True, kw_only=True)
class Item:
    """A running request. Only ``Packing`` changes it."""

    id: str
    """The request's."""
    service: str
    """The service that it asks."""
    size: int
    """KV that it holds, or will hold before the next operations."""
    expected: int
    """What it is expected to grow to; at least ``size``."""
    group: str | None = None
    """Where it is; None while it is between two groups, or new."""
    home: str | None = None
    """Where it was last; None before it was anywhere."""
    stays: bool = False
    """Whether it cannot move now."""

    @property
    def growth(self) -> int:
        """What it is still expected to grow by."""
        return self.expected - self.size
