"""Listing models: aliases and converted GGUF files, and which are in the cache (``shoal models list``)."""

import json
from dataclasses import dataclass
from pathlib import Path

from shoal.models.cache import cache_dir, folder_bytes
from shoal.models.conversion.run_conversion import SOURCE_FILE
from shoal.models.download.catalog import BUNDLED, BundledModel
from shoal.models.download.pull import bundled_folder


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """A bundled or converted model."""

    name: str
    """Alias, or path of the GGUF file."""
    cached: bool
    path: Path | None
    """Folder in the cache; None if it is not cached."""
    size_bytes: int
    """Size on disk if it is cached, else size of the download."""
    licence: str
    description: str
    chat: bool


def list_models() -> list[ModelInfo]:
    """All aliases, then all of the user's GGUF files that were converted into the cache."""
    converted = sorted((cache_dir() / "converted").glob(f"*/{SOURCE_FILE}"))
    return [_bundled(model) for model in BUNDLED.values()] + [_converted(file) for file in converted]


def _bundled(model: BundledModel) -> ModelInfo:
    folder = bundled_folder(model)
    cached = folder.is_dir()
    return ModelInfo(
        name=model.name,
        cached=cached,
        path=folder if cached else None,
        size_bytes=folder_bytes(folder) if cached else model.download_bytes,
        licence=model.licence,
        description=model.description,
        chat=model.chat,
    )


def _converted(source_file: Path) -> ModelInfo:
    folder = source_file.parent
    return ModelInfo(
        name=json.loads(source_file.read_text())["gguf"],
        cached=True,
        path=folder,
        size_bytes=folder_bytes(folder),
        licence="unknown",
        description="converted from GGUF",
        chat=(folder / "chat_template.jinja").is_file(),
    )
