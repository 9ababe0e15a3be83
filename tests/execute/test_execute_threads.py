"""How CPU threads wait."""

import os
import re
import subprocess
import sys

import pytest

pytestmark = pytest.mark.without_native


def waiting(**settings: str) -> list[str]:
    """How long threads spin, as the OpenMP library says: turns of libgomp, or milliseconds of libomp."""
    ours = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
    environment = {name: value for name, value in os.environ.items() if name not in ours}
    command = [sys.executable, "-c", "import shoal.execute, torch"]
    output = subprocess.run(
        command,
        env=environment | {"OMP_DISPLAY_ENV": "VERBOSE"} | settings,
        stderr=subprocess.PIPE,
        text=True,
        check=True,
    ).stderr
    return re.findall(r"(?:GOMP_SPINCOUNT|KMP_BLOCKTIME) ?= ?'(\d+)", output)


@pytest.mark.slow
def test_threads_spin_before_they_sleep() -> None:
    assert waiting() in (["1500"], ["0"])


@pytest.mark.slow
def test_the_wait_policy_of_the_environment_is_kept() -> None:
    assert waiting(OMP_WAIT_POLICY="PASSIVE") == ["0"]
    assert waiting(GOMP_SPINCOUNT="7") in (["7"], ["0"])
