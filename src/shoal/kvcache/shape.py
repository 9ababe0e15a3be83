"""KV shape of a model: layers, KV heads, dtype, and the bytes of a token or block."""

from dataclasses import dataclass

from shoal.core.errors import ConfigError

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
SCALED = 64
"""Elements of an int8 key or value that share a scale."""
SCALE_BYTES = 2


def scales_of(dim: int) -> int:
    """Number of scales of an int8 key or value of ``dim`` elements."""
    return -(-dim // SCALED)


@dataclass(frozen=True, slots=True)
class LayerShape:
    """KV of one attention layer."""

    kv_heads: int
    key_dim: int
    """Elements of one key."""
    value_dim: int
    """Elements of one value."""

    def __post_init__(self) -> None:
        if min(self.kv_heads, self.key_dim, self.value_dim) < 1:
            raise ConfigError(f"a layer's kv_heads, key_dim and value_dim must be at least 1, got {self}")

    @property
    def elements(self) -> int:
        """Key and value elements of one token."""
        return self.kv_heads * (self.key_dim + self.value_dim)


@dataclass(frozen=True, slots=True)
class KVShape:
    """KV of one model."""

    dtype: str
    """Of the model's keys and values: "float32", "bfloat16" or "float16"."""
    layers: tuple[LayerShape, ...]
    """Attention layers, in order."""
    int8: bool = False
    """They are stored as int8, with a scale for every ``SCALED`` elements of a key or value."""

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_BYTES:
            raise ConfigError(f"KV dtype {self.dtype!r} is not known; possible are {', '.join(ITEM_BYTES)}")
        if not self.layers:
            raise ConfigError("a KV shape needs at least one layer")

    @property
    def itemsize(self) -> int:
        """Stored bytes of one element."""
        return 1 if self.int8 else ITEM_BYTES[self.dtype]

    def scale_bytes(self, dim: int) -> int:
        """Bytes of the scales of a key or value of ``dim`` elements."""
        return scales_of(dim) * SCALE_BYTES if self.int8 else 0

    def token_bytes(self) -> int:
        """Bytes of one token's keys and values over all layers."""
        return sum(
            layer.elements * self.itemsize
            + layer.kv_heads * (self.scale_bytes(layer.key_dim) + self.scale_bytes(layer.value_dim))
            for layer in self.layers
        )

    def block_bytes(self, block_size: int) -> int:
        """Bytes of one block of ``block_size`` tokens, without padding."""
        return block_size * self.token_bytes()
