"""What a GGUF file says about its model: keys of the architecture, which are all to be read, and tensors."""

from collections.abc import Collection, Mapping
from typing import Any, NoReturn

from shoal.core import ModelUnsupported

_WITHOUT_EFFECT = frozenset(
    {
        "attention.layer_norm_epsilon",  # of the other kind of norm: each architecture reads its own
        "attention.layer_norm_rms_epsilon",
        "rope.scaling.finetuned",
        "tensor_data_layout",
        "use_parallel_residual",  # StableLM's; what counts is whether it has the norm before the MLP
        "vocab_size",  # that of the embedding counts
    }
)
"""Keys that say nothing about what is computed."""

_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
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
    "pooling_type": (0, 3),  # none, or of the last token, as ours is
    "residual_scale": (0, 1),
    "rope.scaling.alpha": (0,),
    "rope.scaling.yarn_log_multiplier": (0,),
    "router_logit_softcapping": (0,),
}
"""Values with which keys that an architecture does not read say nothing, either."""


class GgufFile:
    """The keys and tensors of a file, some of which are then read; the others can be refused.

    reader: a ``gguf.GGUFReader``. Raises ModelUnsupported where the file names no architecture, or is a part.
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
        """As llama.cpp calls it."""
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
        """The value of the architecture's ``key``; a list of one value for each layer if they all are equal.

        Raises ModelUnsupported where layers have different values.
        """
        value = self.listed(key)
        if isinstance(value, list):
            if not value or value != [value[0]] * len(value):
                self.refuse(key, "differs from layer to layer")
            value = value[0]
        return default if value is None else value

    def listed(self, key: str) -> Any:
        """The value of ``key`` as it is, None where it is absent."""
        self._read.add(key)
        return self._values.get(key)

    def require(self, key: str) -> Any:
        """The value of ``key``; raises ModelUnsupported where it is absent."""
        value = self.get(key)
        if value is None:
            raise ModelUnsupported(f"it lacks the key {self.architecture}.{key}")
        return value

    def token(self, name: str) -> int | None:
        """The id of a special token, such as ``eos``."""
        field = self._fields.get(f"tokenizer.ggml.{name}_token_id")
        return None if field is None else int(field.contents())

    def has(self, tensor: str) -> bool:
        """Whether there is a tensor of that name."""
        return tensor in self._tensors

    def shape(self, tensor: str) -> tuple[int, ...]:
        """Its dimensions in the order of torch; raises ModelUnsupported where there is no such tensor."""
        if tensor not in self._tensors:
            raise ModelUnsupported(f"it has no tensor {tensor}")
        return tuple(int(size) for size in reversed(self._tensors[tensor].shape))

    def numbers(self, tensor: str, count: int) -> list[float] | None:
        """The elements of a tensor of that many, None where there is no such tensor."""
        if tensor not in self._tensors:
            return None
        found: list[float] = self._tensors[tensor].data.ravel().tolist()
        if self._tensors[tensor].tensor_type.name != "F32" or len(found) != count:
            raise ModelUnsupported(f"its tensor {tensor} is not of {count} numbers in float32")
        return found

    def refuse(self, key: str, why: str) -> NoReturn:
        """Raise a ModelUnsupported that names ``key`` with its value."""
        value = self._values.get(key)
        shown = "" if value is None else f" = {value!r:.60}"
        raise ModelUnsupported(f"its key {self.architecture}.{key}{shown} {why}; {INSTEAD}")

    def refuse_unread(self) -> None:
        """Raise ModelUnsupported where a key was not read that may change what the model computes."""
        for key in sorted(self._values.keys() - self._read - _WITHOUT_EFFECT):
            if self._values[key] not in _NEUTRAL.get(key, ()):
                self.refuse(key, "may change what the model computes, and is not read here")

    def refuse_unused(self, used: Collection[str]) -> None:
        """Raise ModelUnsupported where there is a tensor whose name is not among these."""
        for name in self._tensors:
            if name not in used:
                raise ModelUnsupported(f"its tensor {name} has no place in this model; {INSTEAD}")


INSTEAD = "take the model's original folder (config.json with *.safetensors)"
"""What to do about a file that cannot be converted."""
