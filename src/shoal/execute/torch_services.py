"""Services that come and go, as far as torch is concerned: models, views of the KV, and memory."""

from pathlib import Path
from weakref import ref

import torch

from shoal.core import Service
from shoal.execute.malloc import collect_frozen, return_freed_memory
from shoal.execute.model.loading import LoadedModel, ModelSet, context_of
from shoal.execute.torch_executor import TorchExecutor
from shoal.kvcache import PoolLayout


class TorchServices:
    """Changes the services of a torch executor, and of the models that it runs."""

    def __init__(self, models: ModelSet, executor: TorchExecutor) -> None:
        self._models = models
        self._executor = executor

    @property
    def weight_bytes(self) -> int:
        """Size of the weights of all services; shared ones count once."""
        return self._models.weight_bytes

    def load(self, service: Service, folder: Path) -> LoadedModel:
        """The model of a service, loaded and probed; may run in a thread of its own while steps go on.

        Raises as ``load_models`` does.
        """
        model = self._models.loader.load(service, folder)
        context_of(service, model)
        return_freed_memory()  # which loading took for a while
        return model

    def lay_out(self, layout: PoolLayout, host_layout: PoolLayout | None) -> None:
        """See the KV memory in another way from the next plan on."""
        self._executor.store.lay_out(layout, host_layout)

    def add(self, service: Service, model: LoadedModel) -> None:
        """A service comes, between two plans."""
        self._executor.add_service(service, model)

    def remove(self, service: str) -> None:
        """A service goes, of which no sequence is left, and memory of weights that nobody else has."""
        model = self._models.models[service]
        parts = [ref(part) for part in model.module.modules()]
        self._executor.remove_service(service)
        if any(other is model for other in self._models.models.values()):
            return
        del model
        if any(part() is not None for part in parts):  # some code refers to itself in a circle
            collect_frozen()
        return_freed_memory()
        if self._models.device.type == "cuda":
            torch.cuda.empty_cache()
