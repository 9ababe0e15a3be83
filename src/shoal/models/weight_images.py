"""The weight images in the cache: which models they are of, and removing those whose model is gone.

``execute`` makes and reads them; here only their place and their description are known.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from shoal.models.cache import cache_dir, folder_bytes, remove_built

FACTS_FILE = "image.json"
"""Its ``source`` is the model's folder."""


@dataclass(frozen=True, slots=True)
class StoredImage:
    """A weight image in the cache."""

    path: Path
    source: Path | None
    """Folder of the model; None: its description cannot be read."""
    size_bytes: int


def images_dir() -> Path:
    """Folder of all weight images, which may not exist yet."""
    return cache_dir() / "images"


def list_images() -> list[StoredImage]:
    """All weight images that are complete, by name."""
    folders = (path for path in images_dir().glob("[!.]*") if path.is_dir())
    return [StoredImage(path, _source(path), folder_bytes(path)) for path in sorted(folders)]


def remove_orphans() -> None:
    """Remove images of folders that do not exist any more."""
    for image in list_images():
        if image.source is None or not image.source.is_dir():
            remove_built(image.path)


def _source(image: Path) -> Path | None:
    try:
        return Path(json.loads((image / FACTS_FILE).read_bytes())["source"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
