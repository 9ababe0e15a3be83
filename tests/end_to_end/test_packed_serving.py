"""A small run of the packed serving benchmark: streams migrate without changes of their output."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_packed_streams_equal_undisturbed_ones(tmp_path):
    found = tmp_path / "packed.json"
    run = subprocess.run(
        [sys.executable, "-m", "benchmarks.packed_serving", "--small", "--json", str(found)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=400,
    )
    assert run.returncode == 0, run.stdout + run.stderr[-4000:]
    outcomes = json.loads(found.read_text())
    assert all(outcome["passed"] and outcome["compared"] == 24 for outcome in outcomes.values())
    # How many engines are in use depends on how busy the machine is: simulations test that.
    assert all(outcome["in_use"] > 0 for outcome in outcomes.values())
    assert outcomes["max-min"]["moves"] == {}
