"""The models of a simulated engine, and services that come and go at run time."""

from collections.abc import Mapping
from pathlib import Path

from shoal.core import ConfigError, Service
from shoal.engine.simulated.models import ModelOutline, SimulatedModelLoader
from shoal.execute.fetch_link import FetchTimes
from shoal.execute.real_time import RealTimeExecutor
from shoal.execute.simulated import HOST_BYTES_PER_S, SimulatedModel
from shoal.kvcache import PoolLayout
from shoal.schedule.weights_options import WeightsOptions


class SimulatedServices:
    """Models by service, and the executor that runs them; see ``ServiceHost``.

    weights: says whether weights come and go, and how fast at most.
    """

    def __init__(
        self,
        loader: SimulatedModelLoader,
        models: Mapping[str, ModelOutline],
        layout: PoolLayout,
        weights: WeightsOptions,
    ) -> None:
        """Raises ConfigError if nothing says how fast weights come."""
        self.models = dict(models)
        """By service."""
        self._loader = loader
        self._layout = layout
        self._options = weights
        self._fetch_s: dict[str, float] = {}
        """Duration of a fetch, by name of the weights."""
        for name, model in models.items():
            self._note_fetch(name, model)
        self.executor = RealTimeExecutor(
            {name: self._timed(name, model, layout) for name, model in models.items()},
            {name: model.words for name, model in models.items()},
            FetchTimes(seconds=self._fetch_s),
        )

    @property
    def weight_bytes(self) -> int:
        """Size of the weights of all services; shared weights count once."""
        return sum({model.weights_name: model.weight_bytes for model in self.models.values()}.values())

    def load(self, service: Service, folder: Path) -> ModelOutline:
        """The model of a service; may run in another thread. Raises as ``SimulatedModelLoader.load``."""
        model = self._loader.load(service, folder)
        self._fetch_rate(service.name, model)
        return model

    def lay_out(self, layout: PoolLayout, host_layout: PoolLayout | None) -> None:
        """Use another layout from now on; the time of a block's copy does not depend on it."""
        self._layout = layout

    def add(self, service: Service, model: ModelOutline) -> None:
        """Add a service, between two plans."""
        name = service.name
        self.models[name] = model
        self._note_fetch(name, model)
        self.executor.add_service(name, self._timed(name, model, self._layout), model.words)

    def remove(self, service: str) -> None:
        """Remove a service without sequences, between two plans."""
        del self.models[service]
        self.executor.remove_service(service)

    def _timed(self, name: str, model: ModelOutline, layout: PoolLayout) -> SimulatedModel:
        block_bytes = layout.services[name].shape.block_bytes(layout.block_size)
        return SimulatedModel(times=model.times, copy_s=block_bytes / HOST_BYTES_PER_S)

    def _note_fetch(self, name: str, model: ModelOutline) -> None:
        if (rate := self._fetch_rate(name, model)) is not None:
            self._fetch_s[model.weights_name] = model.weight_bytes / rate

    def _fetch_rate(self, name: str, model: ModelOutline) -> float | None:
        """Bytes per second at which the weights come; None: they are always there."""
        if self._options.memory_bytes is None:
            return None
        rates = [] if model.device is None else [model.tp * model.device.host_bytes_per_s]
        if self._options.bandwidth is not None:
            rates.append(self._options.bandwidth)
        if not rates:
            raise ConfigError(
                f"weights.memory: nothing says how fast weights of service {name} come; write "
                "weights.bandwidth, such as 16GB"
            )
        return min(rates)
