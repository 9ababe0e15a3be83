"""WeightSet: fetches and evicts the weights of an engine's models."""

from collections.abc import Sequence
from dataclasses import dataclass

from shoal.core import Arrival, Service
from shoal.execute.model.loading import LoadedModel
from shoal.execute.weights.image import Place, WeightImage
from shoal.execute.weights.loader import WeightLoader


@dataclass(frozen=True, slots=True)
class _Declared:
    """The weights of a service."""

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
        assert model.image is not None
        self._declared[service.name] = _Declared(model.weights_name, model.image)

    def remove(self, service: str) -> None:
        """Remove a service; with the last service on its weights, their memory is given back."""
        removed = self._declared.pop(service)
        if any(declared.name == removed.name for declared in self._declared.values()):
            return
        self._loader.forget(removed.name)
        if removed.image.place is Place.RESIDENT:
            _release(removed.image)

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


def _release(image: WeightImage) -> None:
    image.place = Place.ABSENT
    image.memory.release()
