"""Argument structs of the native attention kernels, as in ``csrc/attention.h``; strides in bytes."""

import ctypes
from ctypes import c_double, c_int64, c_void_p

DTYPES = ("float32", "bfloat16")
"""Dtypes that the kernels support; the index is the number that they use."""
STORED_INT8 = 2
"""The number of int8, for keys and values in the pool."""


class StepAddresses(ctypes.Structure):
    """The packed tokens of a step."""

    _fields_ = (
        ("rows", c_int64),
        ("block_size", c_int64),
        ("starts", c_void_p),
        ("firsts", c_void_p),
        ("table", c_void_p),
        ("table_row", c_int64),
        ("table_block", c_int64),
    )


class LayerAddresses(ctypes.Structure):
    """Location of one layer's keys and values in a service's view of the pool.

    An entry of the pool is a block, or a unit in the split layout. The key of token t of entry e and KV head
    h is at ``keys + e * entry + t * key_token + h * key_head``. The entry is found in the block table at
    ``table_first + h * table_head`` of the block's part. If ``stored`` is int8, scales [groups, tokens]
    begin at ``key_scales + e * entry + h * key_scale_head``. ``dtype`` is the dtype of queries, new keys and
    values, and results.
    """

    _fields_ = (
        ("dtype", c_int64),
        ("stored", c_int64),
        ("kv_heads", c_int64),
        ("key_dim", c_int64),
        ("value_dim", c_int64),
        ("keys", c_void_p),
        ("values", c_void_p),
        ("key_scales", c_void_p),
        ("value_scales", c_void_p),
        ("entry", c_int64),
        ("key_token", c_int64),
        ("value_token", c_int64),
        ("key_head", c_int64),
        ("value_head", c_int64),
        ("key_scale_head", c_int64),
        ("value_scale_head", c_int64),
        ("table_first", c_int64),
        ("table_head", c_int64),
    )


class AttentionCall(ctypes.Structure):
    """One layer's attention: its tensors, and how the work is split into tasks."""

    _fields_ = (
        ("step", c_void_p),
        ("layer", c_void_p),
        ("heads", c_int64),
        ("window", c_int64),
        ("scale", c_double),
        ("softcap", c_double),
        ("query", c_void_p),
        ("key", c_void_p),
        ("value", c_void_p),
        ("query_token", c_int64),
        ("query_head", c_int64),
        ("new_key_token", c_int64),
        ("new_key_head", c_int64),
        ("new_value_token", c_int64),
        ("new_value_head", c_int64),
        ("out", c_void_p),
        ("task_count", c_int64),
        ("tasks", c_void_p),
        ("splits", c_void_p),
        ("partials", c_void_p),
    )


class RotaryCall(ctypes.Structure):
    """Norm and rotary embedding of queries and keys before attention."""

    _fields_ = (
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("dim", c_int64),
        ("interleaved", c_int64),
        ("query_scale", c_void_p),
        ("key_scale", c_void_p),
        ("eps", c_double),
        ("queries", c_void_p),
    )


TASK_FIELDS, SPLIT_FIELDS = 8, 4
"""Number of int64 fields in a task and in a split."""
