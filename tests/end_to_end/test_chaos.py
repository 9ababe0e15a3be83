"""A small run of the chaos benchmark: engines of real streams are killed, stopped and made to fail."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.slow
def test_nothing_is_lost_or_changed_when_engines_die(tmp_path):
    found = tmp_path / "chaos.json"
    run = subprocess.run(
        [sys.executable, str(BENCHMARKS / "chaos.py"), "--small", "--json", str(found)],
        capture_output=True,
        text=True,
        check=False,
        timeout=400,
    )
    assert run.returncode == 0, run.stdout + run.stderr[-4000:]
    outcome = json.loads(found.read_text())
    assert outcome["passed"]
    assert (outcome["kills"], outcome["hangs"], outcome["raises"]) == (1, 1, 1)
    assert outcome["resumed"] >= 10
    assert outcome["differences"]["compared"] >= 10
