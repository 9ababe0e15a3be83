"""How batches are written: presets, ``cluster.batching`` of servers, ``batching`` of scenarios."""

from dataclasses import replace
from pathlib import Path

import pytest
from config_builders import from_flags, from_yaml
from test_config_file import error_of

from shoal.cluster.batching_options import BatchingOptions
from shoal.config import PRESETS
from shoal.config.batch_presets import BATCH_PRESETS
from shoal.config.scenario_file import load_scenario
from shoal.core import ConfigError
from shoal.schedule import Aggressive, Batch

SERVICES = "services: [{name: a, model: smollm2}]\n"
SCENARIO = """\
latency: {roofline: {model: llama-2-7b, device: a100-80}}
workload: {lengths: sharegpt, rate: 4, requests: 10}
"""


def scenario(folder: Path, text: str):
    file = folder / "scenario.yaml"
    file.write_text(SCENARIO + text)
    return load_scenario(file=file)


@pytest.mark.parametrize("name", BATCH_PRESETS)
def test_a_preset_of_batches_sets_scheduler_batching_and_dispatch(name: str, tmp_path: Path):
    preset = PRESETS[name]
    config = from_yaml(tmp_path, SERVICES + f"scheduler: {{preset: {name}}}")
    assert config.scheduler == preset.scheduler
    assert config.scheduler.admission == Batch()
    assert (config.cluster.batching, config.cluster.dispatch) == (preset.batching, preset.dispatch)
    read = scenario(tmp_path, f"scheduler: {{preset: {name}}}")
    assert (read.scheduler, read.batching, read.dispatch) == (
        preset.scheduler,
        preset.batching,
        preset.dispatch,
    )


def test_other_presets_form_no_batches(tmp_path: Path):
    config = from_yaml(tmp_path, SERVICES + "scheduler: {preset: vllm}")
    assert (config.cluster.batching, config.cluster.dispatch) == (None, "max-min")
    assert from_yaml(tmp_path, SERVICES).cluster.batching is None
    assert scenario(tmp_path, "").batching is None


def test_what_is_written_replaces_the_preset_s_key_by_key(tmp_path: Path):
    text = "scheduler: {preset: scls}\ncluster: {dispatch: prefix, batching: {interval: 200ms, slice: 32}}\n"
    config = from_yaml(tmp_path, SERVICES + text)
    expected = replace(BATCH_PRESETS["scls"].batching, interval_s=0.2, slice_tokens=32)
    assert (config.cluster.batching, config.cluster.dispatch) == (expected, "prefix")
    read = scenario(tmp_path, "scheduler: {preset: scls}\ndispatch: prefix\nbatching: {load_factor: 0.3}\n")
    expected = replace(BATCH_PRESETS["scls"].batching, load_factor=0.3)
    assert (read.batching, read.dispatch) == (expected, "prefix")


def test_batches_go_with_any_admission(tmp_path: Path):
    text = "scheduler: {admission: aggressive}\ncluster: {batching: {former: odbs, max_batch: 8}}\n"
    config = from_yaml(tmp_path, SERVICES + text)
    assert isinstance(config.scheduler.admission, Aggressive)
    assert config.cluster.batching == BatchingOptions(former="odbs", max_batch=8)


def test_all_keys(tmp_path: Path):
    text = """\
cluster:
  batching:
    former: slo-odbs-literal
    interval: 1.5s
    load_factor: 0.25
    slice: 64
    max_batch: 4
    trust_predictions: true
    longest_first: true
    lengths: maximum
    memory_share: 80%
"""
    assert from_yaml(tmp_path, SERVICES + text).cluster.batching == BatchingOptions(
        former="slo-odbs-literal",
        interval_s=1.5,
        load_factor=0.25,
        slice_tokens=64,
        max_batch=4,
        trust_predictions=True,
        longest_first=True,
        lengths="maximum",
        memory_share=0.8,
    )
    text = (
        "scheduler: {preset: scls}\ncluster: {batching: {interval: when-idle, load_factor: 0, slice: null}}"
    )
    batching = from_yaml(tmp_path, SERVICES + text).cluster.batching
    assert batching is not None
    assert (batching.interval_s, batching.slice_tokens) == (None, None)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "cluster: {batching: {former: magic}}",
            "shoal.yaml, line 2: cluster.batching.former: expected one of fixed, scls",
        ),
        (
            "cluster: {batching: {lengths: oracle}}",
            "shoal.yaml, line 2: cluster.batching.lengths: expected one of",
        ),
        ("cluster: {batching: {interval: soon}}", "or when-idle"),
        ("cluster: {batching: {size: 4}}", "cluster.batching.size: unknown key"),
        ("cluster: {batching: {load_factor: 0.5}}", "batching.load_factor (0.5) lengthens an interval"),
        ("cluster: {dispatch: mell, batching: {former: fixed}}", "mell packs single requests"),
        ("scheduler: {admission: batch}", "write cluster.batching, such as"),
        ("scheduler: {preset: scls}\ncluster: {batching: null}", "write cluster.batching, such as"),
    ],
)
def test_mistakes(text: str, message: str, tmp_path: Path):
    assert message in error_of(tmp_path, SERVICES + text)


def test_mistakes_in_a_scenario(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"scenario.yaml.*mell packs single requests"):
        scenario(tmp_path, "dispatch: mell\nbatching: {former: fixed}\n")
    with pytest.raises(ConfigError, match="the cluster forms: write batching, such as"):
        scenario(tmp_path, "scheduler: {admission: batch}\n")
    assert scenario(tmp_path, "batching: {lengths: oracle}\n").batching is not None


def test_commands_of_one_engine_without_a_cluster_refuse_batches():
    with pytest.raises(ConfigError, match="batches are formed by `shoal serve` and `shoal simulate`"):
        from_flags("smollm2", preset="uellm").engine_options()
