"""Things that tests need and not every machine has: public data, bundled models, a device, a free port."""

import os
import random
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from shoal.core import ModelUnavailable
from shoal.models import resolve_model

DEVICE = os.environ.get("SHOAL_TEST_DEVICE", "cpu")
"""Where tests of whole models compute; ``cuda:0`` runs them on a GPU."""
on_cpu = pytest.mark.skipif(DEVICE != "cpu", reason="this is there on CPUs only")
"""For tests of what there is on CPUs only."""
on_gpu = pytest.mark.skipif(DEVICE == "cpu", reason="this needs a GPU (SHOAL_TEST_DEVICE=cuda:0)")
"""For tests of what there is on GPUs only."""

SHARED = Path(__file__).parents[2] / "shared"
_PORTS = range(20_000, 30_000)
"""Below those that systems give to whoever asks for any port, so that nobody gets one meanwhile by chance."""


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


def free_port() -> int:
    """A port of 127.0.0.1 at which nobody listens."""
    for port in random.SystemRandom().sample(_PORTS, 20):
        try:
            socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        return port
    raise RuntimeError(f"no port of {_PORTS} is free")
