"""Adding and removing services at run time in a torch executor: models, KV views and memory."""

from pathlib import Path
from weakref import ref

from shoal.core import Service
from shoal.execute.cuda_graphs import empty_cuda_cache
from shoal.execute.malloc import collect_frozen, return_freed_memory
from shoal.execute.model.loading import LoadedModel
from shoal.execute.model.model_set import ModelSet, service_context_tokens
from shoal.execute.torch_executor import TorchExecutor
from shoal.kvcache import PoolLayout


class TorchServices:
    """Adds and removes services of a torch executor and its models."""

    def __init__(self, models: ModelSet, executor: TorchExecutor) -> None:
        self._models = models
        self._executor = executor

    @property
    def weight_bytes(self) -> int:
        """Size of the weights of all services; shared weights count once."""
        return self._models.weight_bytes

    def load(self, service: Service, folder: Path) -> LoadedModel:
        """Load and probe the model of a service; may run in another thread while steps go on.

        Raises as ``load_models`` does.
        """
        model = self._models.loader.load(service, folder)
        service_context_tokens(service, model)
        return_freed_memory()  # temporary memory of loading
        return model

    def lay_out(self, layout: PoolLayout, host_layout: PoolLayout | None) -> None:
        """Change the layout of the KV memory from the next plan on."""
        self._executor.store.lay_out(layout, host_layout)

    def add(self, service: Service, model: LoadedModel) -> None:
        """Add a service, between two plans."""
        self._executor.add_service(service, model)

    def remove(self, service: str) -> None:
        """Remove a service that has no sequences, and free its weights if no other service uses them."""
        model = self._models.services[service].model
        parts = [ref(part) for part in model.module.modules()]
        self._executor.remove_service(service)
        if any(other is model for other in self._models.models):
            return
        del model
        if any(part() is not None for part in parts):  # reference cycles
            collect_frozen()
        return_freed_memory()
        if self._models.device.type == "cuda":
            empty_cuda_cache()
