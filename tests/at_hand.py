"""Things that tests need and that not every machine has: public data, and the bundled models."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from shoal.core import ModelUnavailable
from shoal.models import resolve_model

SHARED = Path(__file__).parents[2] / "shared"


def shared_folder(name: str) -> Path:
    """Public data beside the checkout, or where ``SHOAL_<NAME>`` says; skips the test without."""
    variable = f"SHOAL_{name.upper()}"
    folder = Path(os.environ.get(variable) or SHARED / name)
    if not folder.is_dir():
        pytest.skip(f"no public {name} at {folder}; {variable} can name another folder")
    return folder


def bundled_model(name: str, resolve: Callable[[str], Path] = resolve_model) -> Path:
    """The folder of a bundled model, pulled if need be. Else the test skips, and fails where CI is set."""
    try:
        return resolve(name)
    except ModelUnavailable as error:
        message = f"the bundled model {name} is neither in the cache nor on the index: {error}"
    if os.environ.get("CI", "").lower() in ("", "0", "false"):
        pytest.skip(message)
    pytest.fail(message)
