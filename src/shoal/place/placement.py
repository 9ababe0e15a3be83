"""A placement: groups of devices and the services that share them."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from shoal.core import ConfigError
from shoal.core.cluster import Device


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Devices of one engine and the services that share it (a sharing group in SeaLLM, section 4)."""

    devices: tuple[Device, ...]
    """Of one host and one kind; models are tensor-parallel over all of them."""
    shares: tuple[tuple[str, float], ...] = ()
    """(service, share of its requests), by name; below 1: the service has replicas."""
    shape: "GroupShape" = field(init=False, repr=False, compare=False)
    """What its performance depends on."""
    services: tuple[str, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Precompute what searches use often."""
        memory = min(device.memory_bytes for device in self.devices)
        shape = GroupShape(self.devices[0].kind, memory, len(self.devices), self.shares)
        object.__setattr__(self, "shape", shape)
        object.__setattr__(self, "services", shape.services)

    @property
    def tp(self) -> int:
        """Tensor-parallel size."""
        return len(self.devices)


@dataclass(frozen=True, slots=True)
class GroupShape:
    """What the performance of a group depends on; groups of equal shape are interchangeable."""

    kind: str
    memory_bytes: int
    """Memory per device; the least if they differ."""
    tp: int
    shares: tuple[tuple[str, float], ...]

    @property
    def services(self) -> tuple[str, ...]:
        """The services, by name."""
        return tuple(name for name, _ in self.shares)


@dataclass(frozen=True, slots=True)
class Placement:
    """Groups that have no device in common; groups without services are free devices.

    Raises ConfigError where a device is in two groups.
    """

    groups: tuple[Group, ...]
    """Sorted by first device."""

    def __post_init__(self) -> None:
        names = [device.name for group in self.groups for device in group.devices]
        if len(set(names)) < len(names):
            raise ConfigError("a placement has each device in one group only")

    @classmethod
    def sharing(cls, parts: Iterable[tuple[Sequence[Device], Iterable[str]]]) -> "Placement":
        """From (devices, services); a service's requests are shared in proportion to devices."""
        return cls(()).changed((), parts)

    def changed(
        self, removed: Collection[int], added: Iterable[tuple[Sequence[Device], Iterable[str]]]
    ) -> "Placement":
        """Remove the groups at these indices and add new ones; shares of replicas are recomputed."""
        new = [(tuple(devices), sorted(set(services))) for devices, services in added]
        changed = {name for _, services in new for name in services}
        changed.update(name for at in removed for name in self.groups[at].services)
        kept = [group for at, group in enumerate(self.groups) if at not in removed]
        total: dict[str, int] = defaultdict(int)
        for devices, services in [*new, *((group.devices, group.services) for group in kept)]:
            for name in services:
                total[name] += len(devices)
        groups = [
            Group(devices=devices, shares=tuple((name, len(devices) / total[name]) for name in services))
            for devices, services in new
        ]
        for group in kept:
            if changed.isdisjoint(group.services):
                groups.append(group)
            else:
                shares = tuple((name, group.tp / total[name]) for name in group.services)
                groups.append(Group(devices=group.devices, shares=shares))
        return Placement(tuple(sorted(groups, key=_first_name)))

    @property
    def services(self) -> frozenset[str]:
        return frozenset(name for group in self.groups for name in group.services)

    @property
    def devices(self) -> int:
        """Number of devices of groups with services."""
        return sum(group.tp for group in self.groups if group.shares)

    def __str__(self) -> str:
        """One line per group: its devices and services."""
        return "\n".join(
            f"{', '.join(device.name for device in group.devices)}: {', '.join(group.services) or '-'}"
            for group in self.groups
        )


def _first_name(group: Group) -> str:
    return group.devices[0].name
