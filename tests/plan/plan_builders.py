"""Builders for tests of searches."""

from pathlib import Path

from shoal.config.scenario_file import load_scenario
from shoal.config.scenario_run import PreparedRun, prepare

SCENARIO = """\
latency: {roofline: {device: a100-80}}
kv_cache: {tokens: 4096}
services: [{name: chat, model: llama-3.1-8b, slo: {ttft: 100ms}}]
workload: {lengths: {prompt: 100, output: 10}, rate: 30, requests: 400}
"""


def prepared(folder: Path, text: str = SCENARIO) -> PreparedRun:
    """The scenario in a file with ``text``, ready to run."""
    file = folder / "scenario.yaml"
    file.write_text(text)
    return prepare(load_scenario(file=file))
