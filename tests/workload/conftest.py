import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))


@pytest.fixture(scope="session")
def traces() -> Path:
    """The folder of public traces, where a checkout has one beside it."""
    folder = HERE.parents[2] / "shared" / "traces"
    if not folder.is_dir():
        pytest.skip(f"no public traces at {folder}")
    return folder
