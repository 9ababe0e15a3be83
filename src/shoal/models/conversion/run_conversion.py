"""Running conversions of GGUF files and tokenizers in a subprocess, and keeping the results in the cache.

The subprocess (``shoal.models.conversion.convert``) imports torch and transformers and reads tokenizers. The
calling process does neither, since both would block its other threads for seconds.
"""

import json
import os
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

from shoal.core import ModelUnavailable, ModelUnsupported
from shoal.models.cache import OTHER_DISK_HINT, build_once, cache_dir, fingerprint
from shoal.models.child_process import end_child, start_child
from shoal.models.download.disk_full import disk_full, is_disk_full
from shoal.models.progress import Progress, silent
from shoal.models.tokenizer.added_tokens import (
    ADDED_TOKENS_FILE,
    CONFIG_FILES,
    TOKENIZER_FILE,
    is_complete,
)

REVISION = 6
"""Version of conversions and of what they reject; part of every cache key."""

SOURCE_FILE = "shoal-source.json"
"""File in a converted folder that names its source."""

_TOKENIZER_CONFIGS = (TOKENIZER_FILE, *CONFIG_FILES, ADDED_TOKENS_FILE)
_TOKENIZER_PATTERNS = ("tokenizer*", "vocab*", "merges*", "*.model", "*.tiktoken", "tekken.json")
_OTHER_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".md")


def convert_gguf(gguf_file: Path, folder: Path, progress: Progress) -> None:
    """Convert a GGUF file into a Hugging Face folder with dense bfloat16 weights.

    Quantised layers are also stored in int8, in ``weights.GROUPS_FILE``. Raises ModelUnsupported if
    transformers cannot read this GGUF file.
    """
    _run("gguf", gguf_file, folder, progress)


def converted_gguf(gguf_file: Path, progress: Progress) -> Path:
    """Cached Hugging Face folder of a user's GGUF file; converted again when the file changes."""
    file = gguf_file.resolve()

    def build(folder: Path) -> None:
        convert_gguf(file, folder, progress)
        (folder / SOURCE_FILE).write_text(json.dumps({"gguf": str(file)}))

    target = cache_dir() / "converted" / f"{file.stem}-{fingerprint(REVISION, file, [file])}"
    return build_once(target, build, progress)


def tokenizer_folder(folder: Path, progress: Progress) -> Path:
    """Folder with a complete ``tokenizer.json`` for the model in ``folder``.

    That is ``folder`` itself if its file is complete. Otherwise a tokenizer is converted into the cache,
    from ``vocab.json``, ``tokenizer.model`` and so on, or from a tokenizer.json that lacks tokens of other
    files. Raises ModelUnsupported if transformers finds no tokenizer in the folder, ModelUnavailable if its
    files are broken.
    """
    if not (folder / TOKENIZER_FILE).is_file():
        source = folder.resolve()
        return build_once(
            _converted(folder), lambda built: _run("tokenizer", source, built, progress), progress
        )
    if is_complete(folder):
        return folder

    def complete(built: Path) -> None:
        for name in CONFIG_FILES:
            if (folder / name).is_file():
                shutil.copyfile(folder / name, built / name)
        _run("added-tokens", folder.resolve(), built, progress)

    files = [file for name in _TOKENIZER_CONFIGS if (file := folder / name).is_file()]
    return build_once(_in_cache(folder, files), complete, progress)


def has_tokenizer(folder: Path) -> bool:
    """Whether ``folder`` has files of a tokenizer."""
    return any(True for pattern in _TOKENIZER_PATTERNS for _ in folder.glob(pattern))


def ready_tokenizer_folder(folder: Path) -> Path | None:
    """``tokenizer_folder`` without a conversion: None if the tokenizer would have to be converted first."""
    if (folder / TOKENIZER_FILE).is_file() or _converted(folder).is_dir():
        return tokenizer_folder(folder, silent)
    return None


def _converted(folder: Path) -> Path:
    files = (file for file in folder.iterdir() if file.is_file() and file.suffix not in _OTHER_SUFFIXES)
    return _in_cache(folder, sorted(files))


def _in_cache(folder: Path, files: Iterable[Path]) -> Path:
    source = folder.resolve()
    return cache_dir() / "tokenizers" / f"{source.name}-{fingerprint(REVISION, source, files)}"


def _run(kind: str, source: Path, folder: Path, progress: Progress) -> None:
    # A local conversion must not use the network.
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    arguments = [kind, str(source), str(folder)]
    child = start_child(
        "shoal.models.conversion.convert",
        arguments,
        environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    error: str | None = None
    broken = False
    try:
        assert child.stdout is not None
        assert child.stderr is not None
        for line in child.stdout:
            try:
                report = json.loads(line)
            except ValueError:  # output of a library
                continue
            error = report.get("error", error)
            broken = report.get("broken", broken)
            if "what" in report:
                progress(f"{report['what']} ({source.name})", report["done"], report["total"])
        if child.wait() != 0 or error is not None:
            last = child.stderr.read().decode(errors="replace").strip().splitlines()[-1:]
            reason = error or " ".join(last) or f"exit status {child.returncode}"
            if is_disk_full(reason):
                raise disk_full(f"could not store the {kind} of {source}, converted", folder, OTHER_DISK_HINT)
            if broken:
                raise ModelUnavailable(reason)
            raise ModelUnsupported(f"could not convert the {kind} of {source}: {reason}")
    finally:
        end_child(child)
