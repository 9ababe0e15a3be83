"""Digest of the C sources, to detect a library built from others; also run by the build, on its own."""

import hashlib
from pathlib import Path


def digest(folder: Path) -> str:
    """Hash of names and contents of the C sources in ``folder``, without tests."""
    total = hashlib.sha256()
    for pattern in ("*.[ch]", "kernels/*.[ch]"):
        for file in sorted(folder.glob(pattern)):
            content = file.read_bytes()
            total.update(f"{file.name} {len(content)}\n".encode())
            total.update(content)
    return total.hexdigest()[:16]
