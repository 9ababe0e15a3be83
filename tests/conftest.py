"""Settings of all tests, and the public data that may be nearby."""

import gc
import logging
import os
import sys
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

# Before anything imports torch: models this small take longer with more threads, and workers share the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Servers with a cluster's name keep operators' changes: not in the home of the user.
os.environ.setdefault("SHOAL_STATE", os.path.join(tempfile.gettempdir(), f"shoal-tests-{os.getpid()}"))
sys.path.insert(0, str(Path(__file__).parent))

from at_hand import shared_folder
from hypothesis_profiles import register_profiles
from image_caches import use_image_cache

register_profiles()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keeps what imports and collection make out of garbage collection.

    It is a million objects, none of them garbage: looking through them takes most of a second, and many tests
    collect garbage or make enough of it.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(scope="session")
def traces() -> Path:
    """The folder of public traces."""
    return shared_folder("traces")


@pytest.fixture(scope="session")
def calibration() -> Path:
    """The folder of measurements on real devices."""
    return shared_folder("calibration")


@pytest.fixture
def image_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, in which weight images are made without a child process."""
    use_image_cache(tmp_path / "cache", monkeypatch)
    return tmp_path / "cache"


@pytest.fixture(autouse=True)
def _no_step_fails(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails a test of which a step fails: the engine tries its requests again, and so hides a defect."""
    if request.node.get_closest_marker("failing_steps"):
        yield
        return
    warnings = _Warnings()
    logger = logging.getLogger("shoal.engine.core")
    logger.addHandler(warnings)
    yield
    logger.removeHandler(warnings)
    assert not warnings.messages, "mark a test in which steps are meant to fail with failing_steps"


class _Warnings(logging.Handler):
    """Collects what a logger warns of."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())
