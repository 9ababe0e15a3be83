"""Choice of the executor for a device."""

from importlib.util import find_spec

from shoal.execute.attention.kv_views import UnitIds
from shoal.execute.model.model_set import ModelSet
from shoal.execute.torch_executor import TorchExecutor
from shoal.kvcache import PoolLayout


def make_executor(
    models: ModelSet,
    layout: PoolLayout,
    *,
    depth: int = 1,
    unit_ids: UnitIds | None = None,
    host_layout: PoolLayout | None = None,
    host_unit_ids: UnitIds | None = None,
) -> TorchExecutor:
    """The executor for the device of ``models``; arguments are those of TorchExecutor."""
    if models.device.type == "cuda" and find_spec("triton") is not None:
        # Importing it needs triton, which CPU builds of torch do not include.
        from shoal.execute.gpu.executor import GpuExecutor

        return GpuExecutor(
            models, layout, unit_ids=unit_ids, host_layout=host_layout, host_unit_ids=host_unit_ids
        )
    return TorchExecutor(
        models,
        layout,
        depth=depth,
        unit_ids=unit_ids,
        host_layout=host_layout,
        host_unit_ids=host_unit_ids,
    )
