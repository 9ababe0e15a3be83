"""How many tokens a KV pool holds for each service."""

import json
from collections.abc import Mapping
from pathlib import Path

from shoal.core import Service
from shoal.kvcache import BlockPool, KVCacheOptions, KVShape, LayerShape, plan_layout
from shoal.models import read_facts


def budget_tokens(
    folders: Mapping[Service, Path], options: KVCacheOptions, pool_bytes: int
) -> dict[str, int]:
    """Tokens that fit, by service name, if that service had the whole pool of ``pool_bytes``."""
    shapes = {service.name: _shape(service, folder) for service, folder in folders.items()}
    layout = plan_layout(shapes, memory_bytes=pool_bytes, block_size=options.block_size, kind=options.layout)
    pool = BlockPool(layout)
    return {name: pool.max_blocks(name) * options.block_size for name in shapes}


def _shape(service: Service, folder: Path) -> KVShape:
    """The KV of a service; dtype "auto" is the one that the model's config.json names."""
    dtype = service.dtype
    if dtype == "auto":
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        dtype = str(config.get("dtype") or config.get("torch_dtype") or "float32")
    layers = tuple(
        LayerShape(layer.kv_heads, layer.key_dim, layer.value_dim) for layer in read_facts(folder).layers
    )
    return KVShape(dtype, layers)
