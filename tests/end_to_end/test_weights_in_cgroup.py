"""Weights that come and go within a limit on the memory of all that the process and its page cache hold."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from execute_builders import make_model, tiny_config
from grammar_builders import write_tokenizer

from at_hand import on_cpu

pytestmark = [on_cpu, pytest.mark.slow]
ROOT = Path("/sys/fs/cgroup/memory")
MODELS = 3

# Prints a line of JSON before and after it is limited, and waits for a line of input in between.
PROGRAM = """
import json, sys
import psutil
from shoal import SamplingParams, Service, Shoal
from shoal.schedule import WeightsOptions

folders, memory_bytes = json.loads(sys.argv[1]), int(sys.argv[2])
services = [Service(name=folder, model=folder, dtype="float32") for folder in folders]
greedy = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
with Shoal(services, kv_memory="16MiB", weights=WeightsOptions(memory_bytes=memory_bytes)) as shoal:
    def answers():
        found = [shoal.generate([[1, 2, 3]], greedy, service=folder) for folder in folders]
        return [output.outputs[0].tokens for [output] in found]

    def fetches():
        return sum(each.weights.fetches for each in shoal.stats().services.values())

    first = answers()
    print(json.dumps({"rss": psutil.Process().memory_info().rss}), flush=True)
    sys.stdin.readline()
    before, same, largest = fetches(), True, 0
    for _ in range(4):
        same &= answers() == first
        largest = max(largest, psutil.Process().memory_info().rss)
    print(json.dumps({"rss": largest, "same": same, "fetches": fetches() - before}), flush=True)
"""


@pytest.fixture
def group() -> Iterator[Path]:
    """A control group for memory."""
    folder = ROOT / f"shoal-test-{os.getpid()}"
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    yield folder
    folder.rmdir()


def test_weights_are_read_from_disk_where_the_page_cache_has_no_room(group: Path, tmp_path: Path) -> None:
    """A limit on the process with its page cache, as of a container, ends nothing."""
    config = tiny_config("llama")
    config.update({"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 6, "head_dim": 64})
    config.update({"num_attention_heads": 8})
    folders = []
    for number in range(MODELS):
        folder = make_model(tmp_path / f"m{number}", config, seed=number)
        write_tokenizer(folder)
        folders.append(str(folder))
    size = sum(file.stat().st_size for file in Path(folders[0]).glob("*.safetensors"))
    (group / "memory.swappiness").write_text("0")
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, json.dumps(folders), str(round(1.5 * size))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"SHOAL_CACHE": str(tmp_path / "cache")},
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        (group / "cgroup.procs").write_text(str(process.pid))
        before = json.loads(process.stdout.readline())
        (group / "memory.force_empty").write_text("0")
        limit = before["rss"] + size // 2
        (group / "memory.limit_in_bytes").write_text(str(limit))
        process.stdin.write("\n")
        process.stdin.flush()
        after = json.loads(process.stdout.readline() or "{}")
    assert process.returncode == 0
    assert after["same"]
    assert after["fetches"] >= 4 * (MODELS - 1)
    assert after["rss"] <= before["rss"] + size // 4
    assert int((group / "memory.failcnt").read_text()) > 0, "the limit was never reached"
