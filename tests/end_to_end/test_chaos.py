"""Small runs of the chaos test: kills of engines under load, and of a server's processes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from shoal.native import native_status

ROOT = Path(__file__).parents[2]
CHAOS = [sys.executable, "-m", "benchmarks.chaos"]


@pytest.mark.slow
@pytest.mark.timeout(450)
def test_no_stream_is_lost_or_changed_when_engines_die(tmp_path):
    found = tmp_path / "chaos.json"
    run = subprocess.run(
        [*CHAOS, "--small", "--json", str(found)],
        cwd=ROOT,
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


@pytest.mark.slow
@pytest.mark.skipif(not native_status().startswith("native"), reason="needs native kernels")
def test_a_disturbed_server_gives_the_answers_of_a_quiet_one(tmp_path):
    found = tmp_path / "chaos.json"
    sizes = ["--seconds", "6", "--requests", "14", "--clients", "4", "--between", "0.5"]
    run = subprocess.run(
        [*CHAOS, "--configs", "fastserve-swap", *sizes, "--json", str(found)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )
    assert run.returncode == 0, run.stdout + run.stderr[-4000:]
    outcome = json.loads(found.read_text())
    (configuration,) = outcome["configurations"]
    assert outcome["passed"]
    assert configuration["compared"]
    assert configuration["strikes"]
