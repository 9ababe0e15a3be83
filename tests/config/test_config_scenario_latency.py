"""Step times in scenarios: layer tables and data sheets, links, host overhead, and metadata of folders."""

from pathlib import Path

import pytest
from config_builders import scenario

from layer_tables import write_profile
from shoal.config import prepare
from shoal.config.scenario_pool import capacity
from shoal.core import ConfigError
from shoal.forecast import HostOverhead, StepRows
from shoal.forecast.device_specs import device_spec
from shoal.forecast.latency_sources import ProfileLatency, RooflineLatency, RooflineOptions
from shoal.forecast.model_spec import model_spec
from shoal.forecast.roofline import kv_tokens
from shoal.forecast.roofline_ops import Link

WORK = "workload: {lengths: {prompt: 100, output: 20}, rate: 2, requests: 3}\n"
META = "model: meta-llama/Llama-3.1-8B\nhardware: RTX4090\n"


def test_layer_tables_have_model_device_link_and_overhead(tmp_path: Path) -> None:
    keys = "profile: ., tp: 2, model: qwen3-8b, device: h100, link: {bandwidth: 16e9, latency: 20us}"
    overhead = "overhead: {step: 700us, prompt: 1ms, layer: 60us}"
    read = scenario(tmp_path, f"latency: {{{keys}, {overhead}}}\n{WORK}")
    assert read.latency == ProfileLatency(
        profile=tmp_path / ".",
        tp=2,
        model=model_spec("qwen3-8b"),
        device=device_spec("h100"),
        link=Link(16e9, 20 * 1e-6),
        overhead=HostOverhead(step_s=700 * 1e-6, prompt_s=1e-3, layer_s=60 * 1e-6),
    )


def test_a_roofline_has_link_and_overhead(tmp_path: Path) -> None:
    keys = "device: h100, tp: 2, link: {bandwidth: 1e9, latency: 0s}, overhead: 2ms"
    read = scenario(tmp_path, f"latency: {{roofline: {{{keys}}}}}\n{WORK}")
    overhead = HostOverhead(step_s=0.002)
    assert read.latency == RooflineLatency(
        roofline=RooflineOptions(device=device_spec("h100"), tp=2, link=Link(1e9, 0.0), overhead=overhead)
    )


@pytest.mark.parametrize("kind", ["profile: ./tables", "roofline: {device: rtx-4090, model: llama-3.1-8b"])
def test_overhead_and_link_change_step_times_and_facts(tmp_path: Path, kind: str) -> None:
    for tp in ("tp1", "tp2"):
        write_profile(tmp_path / "tables" / tp)
    (tmp_path / "tables" / "meta.yaml").write_text(META)
    end = "}}" if "roofline" in kind else "}"
    pool = f"kv_cache: {{tokens: 4096}}\n{WORK}"

    def prepared(keys: str):
        return prepare(scenario(tmp_path, f"latency: {{{kind}, tp: 2{keys}{end}\n{pool}"))

    plain = prepared("")
    slow = prepared(", link: {bandwidth: 1e6, latency: 1ms}")
    busy = prepared(", overhead: {step: 1ms, layer: 100us}")
    for rows, added in ((StepRows(1, 50, (), 1), 0.001), (StepRows(0, 0, ((50, 0),), 1), 0.001 + 32e-4)):
        fast, linked, hosted = (
            run.engine.services["default"].times.step_time(rows) for run in (plain, slow, busy)
        )
        assert linked > fast + 65 * 1e-3
        assert hosted - fast == pytest.approx(added)
    assert "tp 2" in plain.facts["service default"]
    assert "link {bandwidth: 1MB, latency: 1ms}" in slow.facts["service default"]
    assert "overhead {step: 1ms, layer: 100us}" in busy.facts["service default"]


@pytest.mark.parametrize("services", ["", "services: [{name: chat}]\n"])
def test_model_and_device_of_a_folder_size_the_pool(tmp_path: Path, services: str) -> None:
    write_profile(tmp_path / "tables", META)
    run = prepare(scenario(tmp_path, f"latency: {{profile: tables}}\n{services}{WORK}"))
    [name] = run.engine.services
    expected = kv_tokens(model_spec("llama-3.1-8b"), device_spec("rtx-4090"))
    assert capacity(run.engine.layout, name) == expected // 16 * 16
    assert run.facts[f"service {name}"].startswith("llama-3.1-8b: step times from measured layers")


def test_written_model_and_device_override_those_of_the_folder(tmp_path: Path) -> None:
    write_profile(tmp_path / "tables", META)
    keys = "latency: {profile: tables, model: qwen3-8b, device: h100}\nservices: [{name: chat}]\n"
    run = prepare(scenario(tmp_path, keys + WORK))
    expected = kv_tokens(model_spec("qwen3-8b"), device_spec("h100"))
    assert capacity(run.engine.layout, "chat") == expected // 16 * 16


def test_memory_is_reserved_beside_weights_and_kv(tmp_path: Path) -> None:
    latency = "latency: {roofline: {device: rtx-4090, model: llama-3.1-8b}}\n"
    plain, smaller = (
        capacity(prepare(scenario(tmp_path, latency + pool + WORK)).engine.layout, "default")
        for pool in ("", "kv_cache: {reserved: 1GiB}\n")
    )
    assert plain - smaller == pytest.approx(2**30 / 131_072, abs=16)
    with pytest.raises(ConfigError, match=r"of which 5\.6 GiB may be used \(kv_cache\.utilisation and res"):
        prepare(scenario(tmp_path, f"{latency}kv_cache: {{reserved: 16GiB}}\n{WORK}"))


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ("link: {bandwidth: 16e9}", "latency.link.latency: missing"),
        ("link: {bandwidth: 0, latency: 1us}", "latency.link.bandwidth: must be more than 0"),
        ("link: {bandwidth: 1, latency: 1us, sharing: 1}", "latency.link.sharing: unknown key"),
        ("overhead: {prompts: 1ms}", "latency.overhead.prompts: unknown key"),
        ("overhead: fast", "latency.overhead: expected a time such as 200ms"),
    ],
)
def test_mistakes_name_their_key(tmp_path: Path, keys: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        scenario(tmp_path, f"latency: {{profile: ., {keys}}}\n{WORK}")


def moe_folder(folder: Path) -> Path:
    """Tables of Qwen3 30B-A3B with made-up times."""
    write_profile(folder, "model: Qwen/Qwen3-30B-A3B\nhardware: RTXPRO6000\n")
    rows = [
        f"{tokens},{experts},{10 + tokens + experts}" for tokens in (1, 64, 512) for experts in (8, 64, 128)
    ]
    (folder / "moe.csv").write_text("\n".join(["tokens,activated_experts,time_us", *rows]))
    return folder


RANKS = """\
latency: {profile: tables, data_parallel: 2%s}
scheduler: {preset: vllm, starvation: never}
workload: {lengths: {prompt: 100, output: 20}, rate: 200, requests: 40}
"""


def test_ranks_are_engines_that_step_together(tmp_path: Path) -> None:
    moe_folder(tmp_path / "tables")
    prepared = prepare(scenario(tmp_path, RANKS % ""))
    run = prepared.run(spans=True)
    assert len(run.engines) == 2
    assert {row.engine for row in run.requests} == {0, 1}
    assert "2 data-parallel ranks" in prepared.facts["service default"]
    busier = prepare(scenario(tmp_path, RANKS % ", expert_imbalance: 1.5")).run()
    assert busier.end_ns > run.end_ns
    slower = prepare(scenario(tmp_path, RANKS % ", link: {bandwidth: 1e9, latency: 1ms}")).run()
    assert slower.end_ns > 3 * run.end_ns


@pytest.mark.parametrize(
    ("rest", "name"),
    [
        ("link: {bandwidth: 1e9, latency: 1ms}", "link"),
        ("drains: {engine: 0, at: 1s}", "drains"),
        ("deaths: {engine: 0, at: 1s}", "deaths"),
    ],
)
def test_ranks_of_a_group_neither_migrate_requests_nor_die(tmp_path: Path, rest: str, name: str) -> None:
    moe_folder(tmp_path / "tables")
    with pytest.raises(ConfigError, match=f"a group of ranks is one engine; leave out {name}"):
        prepare(scenario(tmp_path, RANKS % "" + rest + "\n"))


def test_a_rank_holds_its_share_of_the_experts(tmp_path: Path) -> None:
    moe_folder(tmp_path / "tables")
    model, device = model_spec("qwen3-30b-a3b"), device_spec("rtx-pro-6000")
    experts = model.layers * model.mlp_weights * 2
    assert model.weight_bytes(1, 2) == model.weight_bytes() - experts // 2
    layout = prepare(scenario(tmp_path, RANKS % "")).engine.layout
    room = int(device.memory_bytes * 0.9) - model.weight_bytes(1, 2)
    assert capacity(layout, "default") == pytest.approx(room / model.kv_bytes_per_token(), abs=16)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (RANKS % ", tp: 2", "ranks of several devices"),
        (RANKS % "" + "engines: 2\n", "a group of ranks is one engine; leave out engines"),
        (RANKS % ", model: llama-3.1-8b", "has 0 experts, which 2 ranks cannot divide"),
    ],
)
def test_settings_that_exclude_ranks_are_rejected(tmp_path: Path, text: str, problem: str) -> None:
    moe_folder(tmp_path / "tables")
    with pytest.raises(ConfigError, match=problem):
        prepare(scenario(tmp_path, text))
