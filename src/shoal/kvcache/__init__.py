"""The paged KV cache as numbers: memory layout for several models, block allocator, prefix cache, compaction.

Tensors over the buffer belong to the executor. Block tables, and which requests get blocks or are preempted,
belong to the scheduler.
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
