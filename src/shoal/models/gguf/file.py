"""GgufFile: keys and tensors of a GGUF file; keys that were not read and may matter are rejected."""

from collections.abc import Collection, Mapping
from typing import Any, NoReturn

from shoal.core import ModelUnsupported

_IGNORED_KEYS = frozenset(
    {
        "attention.layer_norm_epsilon",  # may be of the unused kind of norm; each architecture reads its own
        "attention.layer_norm_rms_epsilon",
        "rope.scaling.finetuned",
        "tensor_data_layout",
        "use_parallel_residual",  # StableLM; whether it has a norm before the MLP is decisive
        "vocab_size",  # the embedding's shape is decisive
    }
)
"""Keys that do not affect what is computed."""

_INERT_VALUES: Mapping[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "attention.output_scale": (0, 1),
    "attention.scale": (0,),
    "attention.shared_kv_layers": (0,),
    "attention.sliding_window": (0,),
    "attention.sliding_window_pattern": (1,),
    "attn_logit_softcapping": (0,),
    "embedding_scale": (0, 1),
    "expert_count": (0,),
    "expert_group_count": (0, 1),
    "expert_group_used_count": (0, 1),
    "expert_shared_count": (0,),
    "expert_used_count": (0,),
    "expert_weights_scale": (0, 1),
    "final_logit_softcapping": (0,),
    "interleave_moe_layer_step": (0, 1),
    "leading_dense_block_count": (0,),
    "logit_scale": (0, 1),
    "moe_every_n_layers": (0, 1),
    "nextn_predict_layers": (0,),
    "pooling_type": (0, 3),  # none or last token, as here
    "residual_scale": (0, 1),
    "rope.scaling.alpha": (0,),
    "rope.scaling.yarn_log_multiplier": (0,),
    "router_logit_softcapping": (0,),
}
"""Values with which keys have no effect, if an architecture does not read them."""


class GgufFile:
    """Keys and tensors of a file; remembers which keys were read.

    reader: a ``gguf.GGUFReader``. Raises ModelUnsupported if the file names no architecture, or is a part.
    """

    def __init__(self, reader: Any) -> None:
        named = reader.fields.get("general.architecture")
        if named is None:
            raise ModelUnsupported("it has no general.architecture")
        parts = reader.fields.get("split.count")
        if parts is not None and parts.contents() > 1:
            raise ModelUnsupported(
                f"it is one of {parts.contents()} parts; join them (llama.cpp's llama-gguf-split --merge)"
            )
        self.architecture: str = named.contents()
        prefix = f"{self.architecture}."
        self._fields = reader.fields
        self._values: dict[str, Any] = {
            name.removeprefix(prefix): field.contents()
            for name, field in reader.fields.items()
            if name.startswith(prefix)
        }
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        self._read: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        """The value of the architecture's ``key``; for a list, the value that all layers have.

        Raises ModelUnsupported if layers have different values.
        """
        value = self.listed(key)
        if isinstance(value, list):
            if not value or value != [value[0]] * len(value):
                self.refuse(key, "differs from layer to layer")
            value = value[0]
        return default if value is None else value

    def listed(self, key: str) -> Any:
        """The value of ``key``, which may be a list; None if it is absent."""
        self._read.add(key)
        return self._values.get(key)

    def require(self, key: str) -> Any:
        """The value of ``key``; raises ModelUnsupported if it is absent."""
        value = self.get(key)
        if value is None:
            raise ModelUnsupported(f"it lacks the key {self.architecture}.{key}")
        return value

    def token(self, name: str) -> int | None:
        """The id of a special token, such as ``eos``."""
        field = self._fields.get(f"tokenizer.ggml.{name}_token_id")
        return None if field is None else int(field.contents())

    def has(self, tensor: str) -> bool:
        return tensor in self._tensors

    def shape(self, tensor: str) -> tuple[int, ...]:
        """Dimensions of a tensor in torch's order; raises ModelUnsupported if it does not exist."""
        if tensor not in self._tensors:
            raise ModelUnsupported(f"it has no tensor {tensor}")
        return tuple(int(size) for size in reversed(self._tensors[tensor].shape))

    def numbers(self, tensor: str, count: int) -> list[float] | None:
        """The ``count`` elements of a float32 tensor; None if it does not exist."""
        if tensor not in self._tensors:
            return None
        found: list[float] = self._tensors[tensor].data.ravel().tolist()
        if self._tensors[tensor].tensor_type.name != "F32" or len(found) != count:
            raise ModelUnsupported(f"its tensor {tensor} is not of {count} numbers in float32")
        return found

    def refuse(self, key: str, why: str) -> NoReturn:
        """Raise ModelUnsupported with ``key`` and its value."""
        value = self._values.get(key)
        shown = "" if value is None else f" = {value!r:.60}"
        raise ModelUnsupported(f"its key {self.architecture}.{key}{shown} {why}; {INSTEAD}")

    def refuse_unread(self) -> None:
        """Raise ModelUnsupported if a key was not read that may affect what the model computes."""
        for key in sorted(self._values.keys() - self._read - _IGNORED_KEYS):
            if self._values[key] not in _INERT_VALUES.get(key, ()):
                self.refuse(key, "may change what the model computes, and is not read here")

    def refuse_unused(self, used: Collection[str]) -> None:
        """Raise ModelUnsupported if there is a tensor whose name is not in ``used``."""
        for name in self._tensors:
            if name not in used:
                raise ModelUnsupported(f"its tensor {name} has no place in this model; {INSTEAD}")


INSTEAD = "take the model's original folder (config.json with *.safetensors)"
"""Remedy for a file that cannot be converted."""
