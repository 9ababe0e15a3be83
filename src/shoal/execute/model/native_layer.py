"""NativeLayer: argument structs for computing a whole decoder layer in one native call."""

import ctypes
from ctypes import c_double, c_int64, c_void_p
from typing import Any, Self

import torch

from shoal.execute.linear.native_product import NativeProduct
from shoal.execute.model.decoder_layer import DecoderLayer


class LayerProduct(ctypes.Structure):
    """``struct layer_product`` of csrc/kernels/decoder_layer.c."""

    _fields_ = (("multiply", c_void_p), ("product", c_void_p), ("columns", c_int64))


class LayerConstants(ctypes.Structure):
    """``struct decoder_layer`` there."""

    _fields_ = (
        ("qkv", LayerProduct),
        ("o", LayerProduct),
        ("gated", LayerProduct),
        ("down", LayerProduct),
        ("after_attention", c_void_p),
        ("before_mlp", c_void_p),
        ("after_mlp", c_void_p),
        ("query_scale", c_void_p),
        ("key_scale", c_void_p),
        ("heads", c_int64),
        ("window", c_int64),
        ("interleaved", c_int64),
        ("eps", c_double),
        ("scale", c_double),
        ("softcap", c_double),
    )


class LayerCall(ctypes.Structure):
    """``struct layer_call`` there."""

    _fields_ = (
        ("step", c_void_p),
        ("cache", c_void_p),
        ("task_count", c_int64),
        ("tasks", c_void_p),
        ("splits", c_void_p),
        ("partials", c_void_p),
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("rotary_dim", c_int64),
        ("x", c_void_p),
        ("normed", c_void_p),
        ("scale", c_void_p),
        ("workspace", c_void_p),
    )


_ALIGNMENT = 64
_BUFFERS = 7
"""Number of buffers in a call's workspace, each aligned to cache lines."""


class NativeLayer:
    """A decoder layer whose products are all native.

    layer, products: kept alive, because the structs point to their weights and scales. products: QKV,
    attention output, gate and up, down.
    """

    def __init__(self, layer: DecoderLayer, products: tuple[NativeProduct, ...]) -> None:
        self._recipe = (layer, products)
        packed, spec = layer.attention, layer.attention.attention
        self.index: int = layer.layer
        """Index of the layer in the model."""
        self.heads: int = packed.heads
        """Query heads."""
        self.window: int = spec.window or 0
        """Tokens that a token attends; 0 for all."""
        qkv, o, gated, _down = products
        self._numbers: int = (
            qkv.out_features
            + self.heads * (packed.shape.key_dim + packed.shape.value_dim)
            + gated.out_features
            + 3 * o.out_features
        )
        self.constants = LayerConstants(
            *[LayerProduct(part.function, part.address, part.out_features) for part in products],
            after_attention=_address(layer.after_attention),
            before_mlp=_address(layer.before_mlp),
            after_mlp=_address(layer.after_mlp),
            query_scale=_address(packed.q_scale),
            key_scale=_address(packed.k_scale),
            heads=self.heads,
            window=self.window,
            interleaved=packed.rotary_interleaved,
            eps=layer.eps,
            scale=spec.scale(packed.shape.key_dim),
            softcap=spec.softcap or 0.0,
        )
        self.address = ctypes.addressof(self.constants)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled without addresses, which are other ones in another process."""
        return type(self), self._recipe

    @classmethod
    def from_layer(cls, layer: DecoderLayer) -> Self | None:
        """None if not all products of ``layer`` are native."""
        linears = (layer.qkv, layer.o, layer.gated, layer.down)
        products = tuple(linear for linear in linears if isinstance(linear, NativeProduct))
        return cls(layer, products) if len(products) == len(linears) else None

    def workspace_bytes(self, tokens: int, itemsize: int) -> int:
        """Size of the workspace of a call for ``tokens`` tokens."""
        return self._numbers * tokens * itemsize + _BUFFERS * _ALIGNMENT


def _address(scale: torch.Tensor | None) -> int | None:
    return None if scale is None else scale.data_ptr()
