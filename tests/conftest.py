"""Settings of all tests, and the public data that may be nearby."""

import os
import sys
from pathlib import Path

import pytest

# Before anything imports torch: models this small take longer with more threads, and workers share the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parent))

from at_hand import shared_folder
from hypothesis_profiles import register_profiles

register_profiles()


@pytest.fixture(scope="session")
def traces() -> Path:
    """The folder of public traces."""
    return shared_folder("traces")


@pytest.fixture(scope="session")
def calibration() -> Path:
    """The folder of measurements on real devices."""
    return shared_folder("calibration")
