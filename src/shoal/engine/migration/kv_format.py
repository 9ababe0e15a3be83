"""Whether KV of two engines is compatible: a digest of block layout, KV shape, data types and weights."""

from hashlib import blake2b
from pathlib import Path

from shoal.kvcache import PoolLayout

_WEIGHTS = (".safetensors", ".gguf", ".bin")
# Evenly spread samples of each file of weights: reading them takes a fraction of a second for any model.
_PIECES = 64
_PIECE_BYTES = 4096


def kv_format(layout: PoolLayout, service: str, folder: Path, weights: str) -> str:
    """A digest that is equal where two engines can use each other's KV of a service.

    folder: the model folder. weights: data type, and which weights are loaded.
    """
    view = layout.services[service]
    # A split block's units are padded as those of all services are; a merged block travels without padding.
    unit_bytes = layout.merged_bytes if layout.kind == "split" else 0
    parts = (layout.kind, layout.block_size, unit_bytes, view.shape, weights, _model_digest(folder))
    return blake2b(repr(parts).encode(), digest_size=16).hexdigest()


def _model_digest(folder: Path) -> str:
    """Digest of the configuration, and of names, sizes and samples of the files of weights.

    Two models of one shape differ in most weights, so samples suffice.
    """
    digest = blake2b(digest_size=16)
    for file in sorted(folder.iterdir()):
        if file.name == "config.json":
            digest.update(file.read_bytes())
        elif file.name.endswith(_WEIGHTS):
            size = file.stat().st_size
            digest.update(f"{file.name} {size}\n".encode())
            with file.open("rb") as weights:
                for piece in range(_PIECES):
                    weights.seek(piece * max(0, size - _PIECE_BYTES) // (_PIECES - 1))
                    digest.update(weights.read(_PIECE_BYTES))
    return digest.hexdigest()
