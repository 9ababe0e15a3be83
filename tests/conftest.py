"""Property tests run without deadlines: the machines that run them may be busy. Public data may be nearby."""

import os
from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("patient", settings(), deadline=None)
settings.load_profile("patient")

SHARED = Path(__file__).parents[2] / "shared"


def shared_folder(name: str) -> Path:
    """Public data beside the checkout, or where ``SHOAL_<NAME>`` says; skips the test without."""
    variable = f"SHOAL_{name.upper()}"
    folder = Path(os.environ.get(variable) or SHARED / name)
    if not folder.is_dir():
        pytest.skip(f"no public {name} at {folder}; {variable} can name another folder")
    return folder


@pytest.fixture(scope="session")
def traces() -> Path:
    """The folder of public traces."""
    return shared_folder("traces")


@pytest.fixture(scope="session")
def calibration() -> Path:
    """The folder of measurements on real devices."""
    return shared_folder("calibration")
