"""Models that can be served by name, and which of them are in the cache."""

import json
from dataclasses import dataclass
from pathlib import Path

from shoal.models.cache import cache_dir, folder_bytes
from shoal.models.conversion.run_conversion import SOURCE_FILE
from shoal.models.download.catalog import BUNDLED, BundledModel
from shoal.models.download.pull import bundled_folder


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """One model that Shoal knows by name or has converted."""

    name: str
    """Its alias, or the path of its GGUF file."""
    cached: bool
    """Whether it is in the cache."""
    path: Path | None
    """Its folder in the cache."""
    size_bytes: int
    """Size on disk where it is cached, else of what a pull downloads."""
    licence: str
    """Name of its licence."""
    description: str
    """What it is, in a line."""
    chat: bool
    """Whether it has a chat template."""


def list_models() -> list[ModelInfo]:
    """Every alias, then every GGUF file of the user's that was converted into the cache."""
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
