"""The page about simulation is complete, and its examples run."""

import re
from pathlib import Path

import pytest
from config_builders import scenario

from layer_tables import write_profile
from shoal.config import load_scenario, prepare, scenario_section
from shoal.config.flags import flag_settings
from shoal.config.scenario_flags import SCENARIO_FLAGS
from shoal.config.scenario_kinds import lengths_kind
from shoal.config.scenario_latency import latency_kind
from shoal.config.scenario_pool import capacity
from shoal.measure import FORMATS, summarise

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "simulation.md").read_text(encoding="utf-8")
EXAMPLES = sorted((ROOT / "examples" / "scenarios").glob("*.yaml"))


def rows(columns):
    """The page's table rows of so many cells, without backquotes around whole cells."""
    cells = [re.split(r"\s*(?<!\\)\|\s*", line)[1:-1] for line in PAGE.splitlines() if line.startswith("|")]
    plain = [[re.sub(r"^`([^`]*)`$", r"\1", cell) for cell in row] for row in cells]
    return [
        row for row in plain if len(row) == columns and row[1] not in ("key", "kind") and "---" not in row[0]
    ]


def shown(key):
    return "required" if key.required else key.kind.show(key.default)


def test_the_page_lists_exactly_the_existing_keys():
    documented = {row[0]: row[1:3] for row in rows(4)}
    keys = [(path, key) for path, key in scenario_section().walk() if not path.startswith("scheduler.")]
    assert documented == {path: [key.kind.label, shown(key)] for path, key in keys}


def test_the_page_lists_exactly_the_existing_step_times_and_lengths():
    documented = {(row[0], row[1]): row[2:4] for row in rows(5)}
    sides = lengths_kind().sides.keys[0].kind.policy.sections
    sections = [*latency_kind(Path()).sections.items(), *sides.items()]
    expected = {
        (name, path): [key.kind.label, shown(key)]
        for name, section in sections
        for path, key in section.walk()
    }
    assert documented == expected


def test_the_page_names_every_file():
    named = {word for row in rows(3) for word in row[0].replace("`", "").split(", ")}
    assert {file for file, _ in FORMATS.values()} <= named


def test_the_example_on_the_page_runs(tmp_path):
    example, _ = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    run = prepare(scenario(tmp_path, example)).run()
    assert len(run.requests) == 200
    assert len(run.engines) == 2
    assert summarise(run).overall.ttft_s.p99 < 1


def test_the_recipe_for_vllm_runs(tmp_path):
    _, recipe = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    write_profile(tmp_path / "profiler" / "RTX4090" / "llama", "model: llama-3.1-8b\nhardware: RTX4090\n")
    work = "workload: {lengths: {prompt: 100, output: 20}, rate: 5, requests: 20}\n"
    prepared = prepare(scenario(tmp_path, recipe + work))
    assert prepared.scenario.scheduler.depth == 2
    # vLLM 0.19 found room for 2,588 blocks on this card.
    assert capacity(prepared.engine.layout, "chat") // 16 == pytest.approx(2588, rel=0.01)
    assert [row.finish for row in prepared.run().requests] == ["stop"] * 20


def test_the_python_on_the_page_runs(tmp_path, monkeypatch, capsys):
    first, second = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    exec(compile(first, "simulation.md", "exec"), {})
    assert re.fullmatch(r"0\.\d+ stop\n", capsys.readouterr().out)
    short = "workload: {lengths: sharegpt, rate: 4, requests: 20}\n"
    (tmp_path / "examples" / "scenarios").mkdir(parents=True)
    text = "latency: {roofline: {model: llama-3.1-8b, device: a100-80}}\n" + short
    (tmp_path / "examples" / "scenarios" / "llama_on_a100.yaml").write_text(text)
    monkeypatch.chdir(tmp_path)
    exec(compile(second, "simulation.md", "exec"), {})
    assert {path.name for path in (tmp_path / "results").iterdir()} == {"summary.json", "requests.csv"}


def test_there_are_examples():
    assert {path.name for path in EXAMPLES} == {"llama_on_a100.yaml", "two_services.yaml"}


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_run(path):
    flags = flag_settings({"requests": "40"}, flags=SCENARIO_FLAGS)
    run = prepare(load_scenario(file=path, flags=flags)).run()
    assert [row.finish for row in run.requests] == ["stop"] * 40
