"""CPU threads beside other programs."""

import os
import re
import subprocess
import sys


def test_threads_do_not_spin_while_they_wait():
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    command = [sys.executable, "-c", "import shoal.execute.loading"]
    told = subprocess.run(
        command,
        env=environment | {"OMP_DISPLAY_ENV": "VERBOSE"},
        stderr=subprocess.PIPE,
        text=True,
        check=True,
    ).stderr
    assert re.findall(r"(?:GOMP_SPINCOUNT|KMP_BLOCKTIME) ?= ?'(\d+)", told) == ["0"]
