"""Whether KV can move between two engines: a digest of all that must be the same."""

from hashlib import blake2b
from pathlib import Path

from shoal.kvcache import PoolLayout

_WEIGHTS = (".safetensors", ".gguf", ".bin")
# Of each file of weights so many pieces are read, evenly spread: a fraction of a second for any model.
_PIECES = 64
_PIECE_BYTES = 4096


def kv_format(layout: PoolLayout, service: str, folder: Path, weights: str) -> str:
    """Equal where a service's blocks mean the same in two engines.

    folder: the model's. weights: in what numbers they are computed with, and which they are.
    """
    view = layout.services[service]
    # A split block's units are padded as those of all services are; a merged block travels without padding.
    unit_bytes = layout.merged_bytes if layout.kind == "split" else 0
    facts = (layout.kind, layout.block_size, unit_bytes, view.shape, weights, _model_digest(folder))
    return blake2b(repr(facts).encode(), digest_size=16).hexdigest()


def _model_digest(folder: Path) -> str:
    """Of the configuration, and of names, sizes and samples of the files with weights.

    Two models of one shape differ in most weights, so samples tell them apart.
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
