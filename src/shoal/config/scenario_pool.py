"""Plans the KV pool of a scenario's engines, from the configured size or the device memory."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shoal.config.presets import PRESETS
from shoal.config.scenario import Scenario, ScenarioPool
from shoal.core import ConfigError
from shoal.forecast.device_specs import DeviceSpec
from shoal.forecast.model_spec import ModelSpec
from shoal.kvcache import KVShape, PoolLayout, plan_layout
from shoal.simulate import kv_shape, token_layout

LARGEST_BLOCKS = 2**26
"""Maximum blocks in all engines of a simulation; each takes some dozens of bytes of this process."""
_SWAP_POOLS = 4
"""Default swap space as a multiple of the KV pool, as in the real engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """Model and devices of one service, as far as they are known."""

    model: ModelSpec | None
    """None: not known."""
    weights: str | None = None
    """The model as written; services share weights if model and name are equal."""
    device: DeviceSpec | None
    """None: not known."""
    tp: int
    """Tensor-parallel devices."""
    int8_kv: bool = False
    ranks: int = 1
    """Data-parallel ranks, with expert parallelism."""

    @property
    def weight_bytes(self) -> int:
        """Size of the weights on each device; 0: not known."""
        return 0 if self.model is None else self.model.weight_bytes(self.tp, self.ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pools:
    """The KV memory of each engine."""

    layout: PoolLayout
    host: PoolLayout | None
    """Swap space; None: there is none."""
    sized: bool
    """Whether the size in bytes is real: the KV size of all services is known."""


def plan_pools(scenario: Scenario, deployments: Mapping[str, Deployment]) -> Pools:
    """The pools of one engine; deployments: by service. Raises ConfigError if a size is not known."""
    pool = scenario.kv_cache
    kind = pool.layout or PRESETS[scenario.preset].layout
    shapes = {
        name: kv_shape(deployment.model, deployment.tp, deployment.int8_kv)
        for name, deployment in deployments.items()
        if deployment.model is not None
    }
    unknown = [name for name in deployments if name not in shapes]
    blocks = pool.blocks if pool.tokens is None else pool.tokens // pool.block_size
    if blocks is None:
        if unknown:
            raise ConfigError(
                f"kv_cache: nothing says how much memory KV of service {', '.join(unknown)} takes; write its "
                "model (services: [{name: chat, model: llama-3.1-8b}]), or the size of the pool as "
                "kv_cache.tokens or kv_cache.blocks"
            )
        limit = scenario.weights.memory_bytes
        memory = pool.memory_bytes or _memory_after_weights(deployments, pool, limit)
        try:
            layout = plan_layout(shapes, memory_bytes=memory, block_size=pool.block_size, kind=kind)
        except ConfigError as error:
            given = "utilisation" if pool.memory_bytes is None else "memory (flag --kv-memory)"
            raise ConfigError(f"kv_cache.{given}: {error}") from None
    elif unknown:
        if kind == "split":
            raise ConfigError(
                f"kv_cache.layout: split needs to know the KV of service {', '.join(unknown)}; write its "
                "model, or layout: merged"
            )
        layout = token_layout(blocks, pool.block_size, *deployments)
    else:
        layout = _layout_of_blocks(blocks, shapes, pool.block_size, kind)
    pools = Pools(layout=layout, host=_swap_layout(scenario, layout, unknown), sized=not unknown)
    _check_num_blocks(scenario, pools)
    return pools


def _check_num_blocks(scenario: Scenario, pools: Pools) -> None:
    """Raise ConfigError for more blocks than a simulation can manage."""
    for what, layout in (("kv_cache", pools.layout), ("kv_cache.swap", pools.host)):
        blocks = 0 if layout is None else layout.merged_blocks * scenario.engines
        if blocks > LARGEST_BLOCKS:
            raise ConfigError(
                f"{what}: {blocks:,} blocks in {scenario.engines:,} engine(s), and a simulation can have "
                f"{LARGEST_BLOCKS:,}; take less memory, larger blocks (block_size) or fewer engines"
            )


def capacity(layout: PoolLayout, service: str) -> int:
    """Tokens of ``service`` that the pool can hold for it alone."""
    view = layout.services[service]
    blocks = layout.merged_blocks * view.blocks_per_merged // view.units_per_block
    return blocks * layout.block_size


def _layout_of_blocks(blocks: int, shapes: Mapping[str, KVShape], block_size: int, kind: str) -> PoolLayout:
    """A pool of ``blocks`` blocks, which must have the same size for all services."""
    if len(set(shapes.values())) > 1:
        raise ConfigError(
            f"kv_cache: blocks of {', '.join(shapes)} differ in size, so a number of tokens or blocks does "
            "not say how large the pool is; write kv_cache.memory, such as 40GiB"
        )
    shape = next(iter(shapes.values()))
    memory = blocks * shape.block_bytes(block_size)
    layout = plan_layout(shapes, memory_bytes=memory, block_size=block_size, kind=kind)
    if capacity(layout, next(iter(shapes))) != blocks * block_size:
        raise ConfigError(
            f"a pool of {blocks} blocks of {block_size} tokens cannot be laid out; write kv_cache.memory"
        )
    return layout


def _swap_layout(scenario: Scenario, layout: PoolLayout, unknown: Sequence[str]) -> PoolLayout | None:
    if scenario.scheduler.preemption_mode != "swap":
        return None
    swap_bytes = scenario.kv_cache.swap_bytes
    if not unknown:
        return layout.resized(_SWAP_POOLS * layout.total_bytes if swap_bytes is None else swap_bytes)
    if swap_bytes is not None:
        raise ConfigError(
            f"kv_cache.swap: nothing says how much memory KV of service {', '.join(unknown)} takes; write "
            "its model (services: [{name: chat, model: llama-3.1-8b}])"
        )
    return None


def _memory_after_weights(
    deployments: Mapping[str, Deployment], pool: ScenarioPool, limit: int | None
) -> int:
    """Device memory left for KV after the weights; services on one model share them.

    limit: of the memory for weights.
    """
    devices = {deployment.device for deployment in deployments.values()}
    device = next(iter(devices))
    if device is None or len(devices) > 1:
        named = sorted(each.name for each in devices if each is not None)
        why = f", as the services are on {' and '.join(named)}" if len(named) > 1 else ""
        raise ConfigError(
            f"kv_cache: nothing says how large the pool is{why}; write kv_cache.memory (such as 40GiB), "
            "tokens or blocks, or take all step times from the roofline of one device, which has a memory"
        )
    models = {
        (deployment.weights, deployment.model, deployment.tp, deployment.ranks)
        for deployment in deployments.values()
        if deployment.model is not None
    }
    weights = sum(model.weight_bytes(tp, ranks) for _, model, tp, ranks in models)
    if limit is not None:
        weights = min(weights, limit)
    usable = int(device.memory_bytes * pool.utilisation) - pool.reserved_bytes
    if usable <= weights:
        raise ConfigError(
            f"the weights take {weights / 2**30:.1f} GiB on each {device.name}, of which "
            f"{max(usable, 0) / 2**30:.1f} GiB may be used (kv_cache.utilisation and reserved); raise tp, or "
            "take a larger device"
            + (", or write weights.memory: less of them" if limit is None and len(models) > 1 else "")
        )
    return usable - weights
