"""Attention backend ``native``: C kernels for CPUs that read the KV pool in place, one call per layer."""

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, byref, c_int64, c_void_p
from dataclasses import dataclass

import numpy as np
import torch

from shoal.execute.attention.kv_views import ServiceCache
from shoal.execute.attention.native_structs import (
    DTYPES,
    SPLIT_FIELDS,
    TASK_FIELDS,
    AttentionCall,
    RotaryCall,
    StepAddresses,
)
from shoal.execute.attention.spec import AttentionSpec, PackedSpec
from shoal.execute.attention.torch_backends import PagedAttention
from shoal.execute.batch import StepBatch
from shoal.execute.model.native_layer import LayerCall, NativeLayer
from shoal.kvcache import KVShape
from shoal.native import NativeLibrary, load_native

LARGEST_HEAD = 256
"""Largest size of a key or value that the kernels support, in elements."""


def can_attend(shape: KVShape) -> bool:
    """Whether the kernels support keys and values of this shape."""
    sizes = [size for layer in shape.layers for size in (layer.key_dim, layer.value_dim)]
    return shape.dtype in DTYPES and max(sizes) <= LARGEST_HEAD


@dataclass(frozen=True, slots=True)
class _WorkSplit:
    """How the work of layers of one shape is split into tasks: the arrays that the kernels read."""

    tasks: np.ndarray
    splits: np.ndarray
    partials: torch.Tensor


class NativeAttention(PagedAttention):
    """Attends keys and values in place. A row's result does not depend on the other rows of the step.

    library: the kernels to use; None for those of this CPU.
    """

    def __init__(self, batch: StepBatch, cache: ServiceCache, library: NativeLibrary | None = None) -> None:
        super().__init__(batch, cache)
        library = library or load_native()
        if library is None:
            raise RuntimeError("the native library was not built, or is switched off")
        call = POINTER(AttentionCall)
        self._attend = library.kernel("shoal_attend", call)
        self._attend_rotated = library.kernel("shoal_attend_rotated", call, POINTER(RotaryCall))
        self._list_tasks = library.kernel("shoal_attention_tasks", call, POINTER(c_int64))
        self._partial_floats = library.kernel("shoal_attention_partial", call, result=c_int64)
        self._run_layer = library.kernel("shoal_decoder_layer", c_void_p, POINTER(LayerCall), result=c_int64)
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
        self._rotary = RotaryCall()
        self._splits: dict[tuple[int, int, int, int], _WorkSplit] = {}
        self._angles: dict[tuple[int, int], tuple[torch.Tensor, ...]] = {}
        """Cosines and sines as given (referenced here, so that their ids are not reused), and both in
        float32."""

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, spec: AttentionSpec
    ) -> torch.Tensor:
        query, key, value = self._as_input(query), self._as_input(key), self._as_input(value)
        out = self._prepare_call(layer, len(query), query.shape[1], spec)
        call, size = self._call, query.element_size()
        call.query, call.key, call.value = query.data_ptr(), key.data_ptr(), value.data_ptr()
        call.query_token, call.query_head = query.stride(0) * size, query.stride(1) * size
        call.new_key_token, call.new_key_head = key.stride(0) * size, key.stride(1) * size
        call.new_value_token, call.new_value_head = value.stride(0) * size, value.stride(1) * size
        self._attend(byref(call))
        return out

    def attend_packed(
        self, layer: int, qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, spec: PackedSpec
    ) -> torch.Tensor:
        """Norm, rotate, store and attend in one kernel; see AttentionStep.

        Nothing is rounded to the model's dtype between the input and what is stored.
        """
        qkv, heads, shape = self._as_input(qkv), spec.heads, spec.shape
        out = self._prepare_call(layer, len(qkv), heads, spec.attention)
        call, size = self._call, qkv.element_size()
        call.query_head = call.new_key_head = shape.key_dim * size
        call.new_value_head = shape.value_dim * size
        call.query_token = call.new_key_token = call.new_value_token = qkv.stride(0) * size
        call.query = qkv.data_ptr()
        call.key = call.query + heads * shape.key_dim * size
        call.value = call.key + shape.kv_heads * shape.key_dim * size
        cos, sin = self._float_angles(cos, sin)
        rotated = torch.empty((len(qkv), heads, shape.key_dim), dtype=qkv.dtype)
        rotary = self._rotary
        rotary.cos, rotary.sin = cos.data_ptr(), sin.data_ptr()
        rotary.dim, rotary.interleaved = cos.shape[1], spec.rotary_interleaved
        rotary.query_scale = None if spec.q_scale is None else spec.q_scale.data_ptr()
        rotary.key_scale = None if spec.k_scale is None else spec.k_scale.data_ptr()
        rotary.eps, rotary.queries = spec.norm_eps, rotated.data_ptr()
        self._attend_rotated(byref(self._call), byref(rotary))
        return out.flatten(1)

    def run_layers(
        self,
        layers: Sequence[NativeLayer],
        x: torch.Tensor,
        normed: torch.Tensor,
        angles: Sequence[tuple[torch.Tensor, torch.Tensor]],
        next_scales: Sequence[torch.Tensor | None],
    ) -> None:
        """Run the first layers of a model, each in one native call; the same bits as separate operations.

        x [tokens, hidden], contiguous: the residual stream, updated in place. normed: its norm for the first
        layer; updated in place to the norm for the layer that follows these. angles: cos and sin for each
        layer, as in ``attend_packed``. next_scales: scale of the norm after each layer; None after the
        model's last layer.
        """
        x = self._as_input(x)
        tokens = len(x)
        size = max([layer.workspace_bytes(tokens, x.element_size()) for layer in layers], default=0)
        workspace = torch.empty(size, dtype=torch.uint8)
        call = LayerCall(step=ctypes.addressof(self._step))
        call.x, call.normed, call.workspace = x.data_ptr(), normed.data_ptr(), workspace.data_ptr()
        for layer, (cos, sin), scale in zip(layers, angles, next_scales, strict=True):
            cos, sin = self._float_angles(cos, sin)
            split = self._work_split(layer.index, layer.heads, layer.window)
            call.cache = ctypes.addressof(self.cache.addresses[layer.index])
            call.task_count = len(split.tasks)
            call.tasks, call.splits = split.tasks.ctypes.data, split.splits.ctypes.data
            call.partials = split.partials.data_ptr()
            call.cos, call.sin, call.rotary_dim = cos.data_ptr(), sin.data_ptr(), cos.shape[1]
            call.scale = None if scale is None else scale.data_ptr()
            if not self._run_layer(layer.address, byref(call)):
                raise MemoryError("no memory for the inputs of a linear layer")

    def _prepare_call(self, layer: int, tokens: int, heads: int, spec: AttentionSpec) -> torch.Tensor:
        """Fill in all of the call but its inputs; returns its empty output [tokens, heads, value_dim]."""
        call, extent = self._call, self.cache.layers[layer]
        call.layer = ctypes.addressof(self.cache.addresses[layer])
        call.heads, call.window = heads, spec.window or 0
        call.scale = spec.scale(extent.key_dim)
        call.softcap = spec.softcap or 0.0
        split = self._work_split(layer, heads, call.window)
        call.task_count = len(split.tasks)
        call.tasks, call.splits = split.tasks.ctypes.data, split.splits.ctypes.data
        call.partials = split.partials.data_ptr()
        out = torch.empty((tokens, heads, extent.value_dim), dtype=self.cache.dtype)
        call.out = out.data_ptr()
        return out

    def _float_angles(self, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Both in float32 and contiguous; cached, since most layers of a step have the same."""
        known = self._angles.get((id(cos), id(sin)))
        if known is None:
            known = self._angles[id(cos), id(sin)] = (
                cos,
                sin,
                cos.float().contiguous(),
                sin.float().contiguous(),
            )
        return known[2], known[3]

    def _as_input(self, x: torch.Tensor) -> torch.Tensor:
        """``x``, made contiguous in its last dimension if it is not."""
        if x.dtype != self.cache.dtype:
            raise ValueError(f"attention in {x.dtype}, but the service's KV is {self.cache.dtype}")
        return x if x.stride(-1) == 1 else x.contiguous()

    def _work_split(self, layer: int, heads: int, window: int) -> _WorkSplit:
        """The work split of a layer, computed once for all layers of its shape."""
        extent = self.cache.layers[layer]
        shape = (heads, extent.kv_heads, extent.value_dim, window)
        split = self._splits.get(shape)
        if split is None:
            self._call.layer = ctypes.addressof(self.cache.addresses[layer])
            self._call.heads, self._call.window = heads, window
            split = self._splits[shape] = self._split_work()
        return split

    def _split_work(self) -> _WorkSplit:
        """Split the work of the present call into tasks."""
        counts = (c_int64 * 3)()
        self._call.tasks = None
        self._list_tasks(byref(self._call), counts)
        tasks, splits, partials = counts
        split = _WorkSplit(
            np.empty((tasks, TASK_FIELDS), dtype=np.int64),
            np.empty((splits, SPLIT_FIELDS), dtype=np.int64),
            torch.empty(partials * self._partial_floats(byref(self._call))),
        )
        self._call.tasks, self._call.splits = split.tasks.ctypes.data, split.splits.ctypes.data
        self._list_tasks(byref(self._call), counts)
        return split
