"""WeightSet: fetches and evicts the weights of an engine's models, and checks the memory for them."""

from collections.abc import Sequence
from dataclasses import dataclass

from shoal.core import Arrival, ConfigError, Service
from shoal.execute.model.loading import LoadedModel
from shoal.execute.weights.image import Place, WeightImage
from shoal.execute.weights.loader import WeightLoader


@dataclass(frozen=True, slots=True)
class _Declared:
    """A service and its weights."""

    service: Service
    name: str
    """Name of the weights; services with equal names share them."""
    image: WeightImage


class WeightSet:
    """The weights of all models of an engine, by the names that plans use. None are in memory at first.

    budget_bytes: bytes of weights that plans have in memory at most. bandwidth: limit on the bytes per second
    of a fetch; None: no limit.
    """

    def __init__(self, budget_bytes: int, bandwidth: float | None = None) -> None:
        self.budget_bytes = budget_bytes
        self._loader = WeightLoader(bandwidth)
        self._declared: dict[str, _Declared] = {}
        """By service."""

    def add(self, service: Service, model: LoadedModel) -> None:
        """Add a service's model, which was loaded from an image."""
        self._declared[service.name] = _declare(service, model)

    def remove(self, service: str) -> None:
        """Remove a service; with the last service on its weights, their memory is given back."""
        removed = self._declared.pop(service)
        if any(declared.name == removed.name for declared in self._declared.values()):
            return
        self._loader.forget(removed.name)
        if removed.image.place is Place.RESIDENT:
            _release(removed.image)

    def check(self, *others: tuple[Service, LoadedModel]) -> None:
        """Raise ConfigError if the budget is too small for some of these services.

        others: services that are to be added. All pinned weights, and any one besides, must fit.
        """
        check_budget(self.budget_bytes, [*self._declared.values(), *(_declare(*other) for other in others)])

    def evict(self, names: Sequence[str]) -> None:
        """Give back the memory of weights, which no step may use meanwhile."""
        for name in names:
            image = self._find(name)
            if image.place is not Place.RESIDENT:
                raise RuntimeError(f"weights are to be evicted that are {image.place.value}: {name}")
            _release(image)

    def fetch(self, names: Sequence[str]) -> None:
        """Begin to read weights into memory, one after the other."""
        for name in names:
            image = self._find(name)
            if image.place is not Place.ABSENT:
                raise RuntimeError(f"weights are to be fetched that are {image.place.value}: {name}")
            self._loader.fetch(name, image)

    def arrivals(self) -> Sequence[Arrival]:
        """Weights that came, or could not be read, since the last call; returns at once."""
        return self._loader.arrivals()

    @property
    def arrived(self) -> bool:
        """Whether ``arrivals`` has something to return."""
        return self._loader.arrived

    def close(self) -> None:
        """Stop reading."""
        self._loader.close()

    def _find(self, name: str) -> WeightImage:
        found = next((each.image for each in self._declared.values() if each.name == name), None)
        if found is None:
            raise RuntimeError(f"no service has the weights {name}")
        return found


def _declare(service: Service, model: LoadedModel) -> _Declared:
    assert model.image is not None
    return _Declared(service, model.weights_name, model.image)


def _release(image: WeightImage) -> None:
    image.place = Place.ABSENT
    image.memory.release()


def check_budget(budget_bytes: int, declared: Sequence[_Declared]) -> None:
    """Raise ConfigError unless all pinned weights, and any one besides, fit into the budget."""
    pinned = {each.name: each for each in declared if each.service.pin}
    others = [each for each in declared if each.name not in pinned]
    pinned_bytes = sum(each.image.num_bytes for each in pinned.values())
    largest = max(others, key=lambda each: each.image.num_bytes, default=None)
    needed = pinned_bytes + (0 if largest is None else largest.image.num_bytes)
    if needed <= budget_bytes:
        return
    parts = [f"{each.service.name!r} ({_mib(each.image.num_bytes)}, pinned)" for each in pinned.values()]
    if largest is not None:
        parts.append(f"{largest.service.name!r} ({_mib(largest.image.num_bytes)})")
    raise ConfigError(
        f"weights.memory: {_mib(budget_bytes)} are less than the {_mib(needed)} of {', '.join(parts)}, which"
        " must be in memory at once; raise it, or pin fewer services"
    )


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.1f} MiB"
