"""Attention in the KV pool with native kernels: no gathers, no masks, one call a layer for all rows."""

import ctypes
from ctypes import POINTER, byref, c_int64
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from shoal.execute.attention_structs import (
    DTYPES,
    SPLIT_FIELDS,
    TASK_FIELDS,
    AttentionCall,
    StepAddresses,
)
from shoal.execute.batch import StepBatch
from shoal.execute.kv_store import ServiceCache
from shoal.execute.paged import PagedStep
from shoal.kvcache import KVShape
from shoal.native import NativeLibrary, load_native

LARGEST_HEAD = 256
"""Elements of the largest key or value that the kernels take."""


def can_attend(shape: KVShape) -> bool:
    """Whether the kernels take keys and values of this shape."""
    sizes = [size for layer in shape.layers for size in (layer.key_dim, layer.value_dim)]
    return shape.dtype in DTYPES and max(sizes) <= LARGEST_HEAD


@dataclass(frozen=True, slots=True)
class _Shared:
    """How the work of layers of one shape is shared; the arrays that the kernels read."""

    tasks: np.ndarray
    splits: np.ndarray
    partials: torch.Tensor


class NativeStep(PagedStep):
    """Attends keys and values where they lie. A row's result does not depend on what else is in the step.

    library: the kernels to use; None for those of this CPU.
    """

    def __init__(self, batch: StepBatch, cache: ServiceCache, library: NativeLibrary | None = None) -> None:
        super().__init__(batch, cache)
        library = library or load_native()
        if library is None:
            raise RuntimeError("the native library was not built, or is switched off")
        call = POINTER(AttentionCall)
        self._attend = library.kernel("shoal_attend", call)
        self._list_tasks = library.kernel("shoal_attention_tasks", call, POINTER(c_int64))
        self._partial_floats = library.kernel("shoal_attention_partial", call, result=c_int64)
        self._table = np.ascontiguousarray(cache.entries(batch.tables))
        self._step = StepAddresses(
            len(batch.firsts),
            cache.block_size,
            batch.starts.ctypes.data,
            batch.firsts.ctypes.data,
            self._table.ctypes.data,
            self._table.shape[1] * self._table.shape[2],
            self._table.shape[2],
        )
        self._call = AttentionCall(step=ctypes.addressof(self._step))
        self._shared: dict[tuple[int, int, int, int], _Shared] = {}

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scaling: float | None,
        window: int | None,
        softcap: float | None,
        extra: dict[str, Any],
    ) -> torch.Tensor:
        """See AttentionStep."""
        del extra
        query, key, value = self._usable(query), self._usable(key), self._usable(value)
        tokens, heads, key_dim = query.shape
        size = query.element_size()
        call = self._call
        call.layer = ctypes.addressof(self.cache.addresses[layer])
        call.heads, call.window = heads, window or 0
        call.scale = key_dim**-0.5 if scaling is None else scaling
        call.softcap = softcap or 0.0
        self._share(layer)
        call.query, call.key, call.value = query.data_ptr(), key.data_ptr(), value.data_ptr()
        call.query_token, call.query_head = query.stride(0) * size, query.stride(1) * size
        call.new_key_token, call.new_key_head = key.stride(0) * size, key.stride(1) * size
        call.new_value_token, call.new_value_head = value.stride(0) * size, value.stride(1) * size
        out = torch.empty((tokens, heads, value.shape[2]), dtype=query.dtype)
        call.out = out.data_ptr()
        self._attend(byref(call))
        return out

    def _usable(self, x: torch.Tensor) -> torch.Tensor:
        """``x``, whose rows the kernels can read."""
        if x.dtype != self.cache.dtype:
            raise ValueError(f"attention in {x.dtype}, but the service's KV is {self.cache.dtype}")
        return x if x.stride(-1) == 1 else x.contiguous()

    def _share(self, layer: int) -> None:
        """Share the work of the call, as another layer of the same shape did where there was one."""
        call, extent = self._call, self.cache.layers[layer]
        shape = (call.heads, extent.kv_heads, extent.value_dim, call.window)
        shared = self._shared.get(shape)
        if shared is None:
            shared = self._shared[shape] = self._new_tasks()
        call.task_count = len(shared.tasks)
        call.tasks, call.splits = shared.tasks.ctypes.data, shared.splits.ctypes.data
        call.partials = shared.partials.data_ptr()

    def _new_tasks(self) -> _Shared:
        counts = (c_int64 * 3)()
        self._call.tasks = None
        self._list_tasks(byref(self._call), counts)
        tasks, splits, partials = counts
        shared = _Shared(
            np.empty((tasks, TASK_FIELDS), dtype=np.int64),
            np.empty((splits, SPLIT_FIELDS), dtype=np.int64),
            torch.empty(partials * self._partial_floats(byref(self._call))),
        )
        self._call.tasks, self._call.splits = shared.tasks.ctypes.data, shared.splits.ctypes.data
        self._list_tasks(byref(self._call), counts)
        return shared
