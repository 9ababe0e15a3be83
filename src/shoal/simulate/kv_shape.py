"""KV layout of a model that is known only by its dimensions."""

from shoal.core import ConfigError
from shoal.forecast import ModelSpec
from shoal.kvcache import KVShape, LayerShape

_DTYPES = {4.0: "float32", 2.0: "bfloat16", 1.0: "bfloat16"}


def kv_shape(model: ModelSpec, tp: int, int8: bool) -> KVShape:
    """The KV of ``model`` on each of ``tp`` devices; one-byte KV is laid out as half as many two-byte
    numbers.

    int8: with the scales of our int8 KV.
    """
    if int8:
        layer = LayerShape(model.kv_heads_on(tp), model.head_dim, model.head_dim)
        return KVShape("bfloat16", (layer,) * model.layers, int8=True)
    dtype = _DTYPES.get(model.kv_bytes_each)
    if dtype is None:
        raise ConfigError(f"model {model.name}: KV of {model.kv_bytes_each} bytes a number has no layout")
    width = model.head_dim if model.kv_bytes_each > 1 else max(1, model.head_dim // 2)
    return KVShape(dtype, (LayerShape(model.kv_heads_on(tp), width, width),) * model.layers)
