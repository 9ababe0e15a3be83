"""The KV pool: block extents of several models in one buffer, their allocator and prefix index.

Here belong sizes, offsets, ids, reference counts and hashes: numbers only. Tensors over the buffer
belong to the executor. Which requests get blocks, wait or are preempted belongs to the scheduler, and so
do the requests' block tables.
"""

from shoal.kvcache.allocator import IntegrityError
from shoal.kvcache.compaction import BlockMove
from shoal.kvcache.layout import LayerExtent, PoolLayout, ServiceLayout, plan_layout
from shoal.kvcache.layout_changes import MAX_PADDING, extend_layout, keeps_blocks, reduce_layout
from shoal.kvcache.options import KV_DTYPES, KVCacheOptions
from shoal.kvcache.pool import BlockPool
from shoal.kvcache.prefix import PrefixIndex, hash_blocks, hash_next, hash_salt, hash_synthetic
from shoal.kvcache.shape import SCALE_BYTES, SCALED, KVShape, LayerShape, scales_of
from shoal.kvcache.usage import PoolUsage, ServiceUsage

__all__ = [
    "KV_DTYPES",
    "MAX_PADDING",
    "SCALED",
    "SCALE_BYTES",
    "BlockPool",
    "IntegrityError",
    "KVCacheOptions",
    "KVShape",
    "LayerExtent",
    "LayerShape",
    "BlockMove",
    "PoolLayout",
    "PoolUsage",
    "PrefixIndex",
    "ServiceLayout",
    "ServiceUsage",
    "keeps_blocks",
    "extend_layout",
    "hash_blocks",
    "hash_next",
    "hash_salt",
    "hash_synthetic",
    "plan_layout",
    "reduce_layout",
    "scales_of",
]
