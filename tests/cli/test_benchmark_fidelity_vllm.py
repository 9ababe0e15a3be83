"""The comparison with vLLM's runs reads the settings of a run, and reports missing files."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from layer_tables import write_profile
from shoal.config import load_scenario, prepare
from shoal.measure import write_run

ROOT = Path(__file__).parents[2]
META = {
    "engine_kwargs": {"tensor_parallel_size": 1, "data_parallel_size": 1, "max_model_len": 512},
    "kv_cache": {"num_gpu_blocks": 40, "block_size": 16, "enable_prefix_caching": True},
    "scheduler": {"max_num_seqs": 8, "max_num_batched_tokens": 64, "async_scheduling": True},
}
SCENARIO = """\
latency: {profile: run/profile}
kv_cache: {blocks: 40}
scheduler:
  {preset: vllm, starvation: never, admission: {policy: aggressive, watermark: 1}, depth: 2, max_running: 8,
   max_batched_tokens: 64}
services: [{name: chat, model: llama-3.1-8b, context: 512}]
workload: {lengths: {prompt: 60, output: 40}, rate: 300, requests: 30}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run with few blocks and sequences; it is simulated, so nothing may differ."""
    folder = tmp_path / "run"
    write_profile(folder / "profile", "model: meta-llama/Llama-3.1-8B\nhardware: RTX4090\n")
    (tmp_path / "scenario.yaml").write_text(SCENARIO)
    record = prepare(load_scenario(file=tmp_path / "scenario.yaml")).run()
    assert record.engines[0].preemptions > 0
    write_run(record, folder / "measured", formats=["jsonl"])
    (folder / "measured" / "meta.json").write_text(json.dumps(META))
    return folder


def run(folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.fidelity_vllm", "--calibration", str(folder), *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=ROOT)


def test_blocks_sequences_and_depth_are_the_run_s_own(folder: Path) -> None:
    found = run(folder)
    assert found.returncode == 0, found.stderr
    assert "depth 1" in found.stdout
    assert found.stdout.split("depth 2")[1].count("+0.0%") == 9


@pytest.mark.slow
def test_ranks_that_divide_experts_are_simulated(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    write_profile(folder / "profile", "model: Qwen/Qwen3-30B-A3B\nhardware: RTXPRO6000\n")
    rows = [f"{tokens},{experts},{9 + tokens + experts}" for tokens in (1, 512) for experts in (8, 128)]
    (folder / "profile" / "moe.csv").write_text("\n".join(["tokens,activated_experts,time_us", *rows]))
    ranks = SCENARIO.replace("profile: run/profile", "profile: run/profile, data_parallel: 2")
    (tmp_path / "scenario.yaml").write_text(ranks.replace("llama-3.1-8b", "qwen3-30b-a3b"))
    write_run(
        prepare(load_scenario(file=tmp_path / "scenario.yaml")).run(), folder / "measured", formats=["jsonl"]
    )
    engine = {**META["engine_kwargs"], "data_parallel_size": 2, "enable_expert_parallel": True}
    (folder / "measured" / "meta.json").write_text(json.dumps({**META, "engine_kwargs": engine}))
    found = run(folder)
    assert found.returncode == 0, found.stderr
    assert found.stdout.count("+0.0%") == 9
    fitted = run(folder, "--fit", "20")
    assert "overhead fitted to 20 requests: 0.0 us a step, 0.0 us a layer" in fitted.stdout


@pytest.mark.slow
def test_missing_files_and_keys_are_named(folder: Path) -> None:
    (folder / "measured" / "meta.json").write_text(json.dumps({**META, "kv_cache": {}}))
    assert "meta.json does not say 'num_gpu_blocks'" in run(folder).stderr
    (folder / "measured" / "meta.json").unlink()
    found = run(folder)
    assert found.returncode == 1
    assert found.stderr.startswith("there is no ")
    assert "measured/meta.json; point --calibration at a folder" in found.stderr
