"""Simulated engines: where their step times are written, and what is said where they are not."""

from pathlib import Path

import pytest
from config_builders import from_flags, from_yaml

from shoal.config.devices import read_added_engine
from shoal.config.setting_tree import node_of
from shoal.core import ConfigError
from shoal.engine.options import SIMULATED
from shoal.forecast import LatencyModel, LatencyProfile, model_spec, save_profile
from shoal.forecast.device_specs import device_spec
from shoal.forecast.latency_sources import (
    EngineLatency,
    FitLatency,
    ProfileLatency,
    RooflineLatency,
    RooflineOptions,
)

SERVICES = "services: [{name: chat, model: smollm2}, {name: code, model: gemma3-270m}]"


def sheet(device: str, **options) -> RooflineLatency:
    return RooflineLatency(roofline=RooflineOptions(device=device_spec(device), **options))


def everywhere(device: str) -> EngineLatency:
    return EngineLatency(default=sheet(device))


def profile_in(folder: Path) -> Path:
    file = folder / "latency.json"
    model = LatencyModel(constant_s=0.01, sequence_s=0, token_s=0, context_s=0, work_s=0)
    save_profile(LatencyProfile(device="cpu", threads=1, models={("chat", 1): model}), file)
    return file


def latencies(tmp_path, *lines):
    plans = from_yaml(tmp_path, "\n".join((SERVICES, *lines))).engine_plans()
    assert {plan.options.device for plan in plans} == {SIMULATED}
    return [plan.options.latency for plan in plans]


def error_of(tmp_path, *lines):
    with pytest.raises(ConfigError) as error:
        from_yaml(tmp_path, "\n".join((SERVICES, *lines))).engine_plans()
    return str(error.value).replace(f"{tmp_path}/", "")


@pytest.mark.parametrize(
    "lines",
    [
        ("devices: [simulated]", "latency: h100"),
        ("devices: ['simulated:h100']",),
        ("devices: [{device: simulated, latency: H100}]", "latency: v100"),
        ("devices: [{device: 'simulated:h100', name: a}]",),
        ("devices: [simulated]", "latency: {roofline: {device: h100}}"),
    ],
)
def test_step_times_of_a_device_are_written_in_several_ways(tmp_path, lines):
    assert latencies(tmp_path, *lines) == [everywhere("h100")]


def test_every_engine_may_have_its_own(tmp_path):
    file = profile_in(tmp_path)
    read = latencies(
        tmp_path,
        "devices:",
        "  - simulated:latency.json",
        "  - {device: simulated, latency: {roofline: {device: a100-80, model: llama-3.1-8b, tp: 2}}}",
        "  - {device: simulated, latency: {fit: latency.json, service: chat}}",
        "  - simulated",
        "latency: l40s",
    )
    llama = sheet("a100-80", model=model_spec("llama-3.1-8b"), tp=2)
    assert read == [
        EngineLatency(default=FitLatency(fit=file)),
        EngineLatency(default=llama),
        EngineLatency(default=FitLatency(fit=file, service="chat")),
        everywhere("l40s"),
    ]


def test_a_service_may_have_its_own(tmp_path):
    profile_in(tmp_path)
    tables = tmp_path / "tables"
    tables.mkdir()
    written = "{services: {chat: latency.json, code: tables}, roofline: {device: h100}}"
    [read] = latencies(tmp_path, "devices: [simulated]", f"latency: {written}")
    assert read.default == sheet("h100")
    assert read.of("chat") == FitLatency(fit=tmp_path / "latency.json")
    assert read.of("code") == ProfileLatency(profile=tables)
    [alone] = latencies(tmp_path, "devices: [simulated]", "latency: {services: {chat: h100, code: v100}}")
    assert (alone.default, alone.of("code")) == (None, sheet("v100"))


def test_flags_say_it_for_all_engines_or_for_each(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = profile_in(tmp_path)
    both = from_flags("smollm2", device=("simulated", "simulated:h200"), latency="latency.json")
    assert [plan.options.latency for plan in both.engine_plans()] == [
        EngineLatency(default=FitLatency(fit=file)),
        everywhere("h200"),
    ]
    named = from_yaml(tmp_path, f"{SERVICES}\ndevices: [simulated]", latency="h100")
    assert named.engine_plans()[0].options.latency == everywhere("h100")


def test_a_file_whose_name_is_a_device_is_written_as_a_path(tmp_path):
    profile_in(tmp_path).rename(tmp_path / "h100")
    named, path = latencies(tmp_path, "devices: ['simulated:h100', 'simulated:./h100']")
    assert named == everywhere("h100")
    assert path == EngineLatency(default=FitLatency(fit=tmp_path / "h100"))


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (("devices: [simulated]",), "nothing says how long its steps take; write as latency the name of a"),
        (
            ("devices: [simulated, cpu]", "latency: h100"),
            "shoal.yaml, line 2: devices: simulated engines make up their tokens, so they cannot be beside",
        ),
        (
            ("devices: [cpu]", "latency: h100"),
            "shoal.yaml, line 3: latency: is of simulated engines, and there is none",
        ),
        (
            ("devices: [{device: cpu, latency: h100}]",),
            "shoal.yaml, line 2: devices[0]: latency is of simulated devices only, and device is cpu",
        ),
        (
            ("devices: [{device: 'simulated:h100', latency: h200}]",),
            "shoal.yaml, line 2: devices[0]: the latency is written twice: here, and in simulated:h100",
        ),
        (
            ("devices: ['simulated:h10']",),
            "shoal.yaml, line 2: devices[0]: device 'h10' is not known; did you mean 'h100'?",
        ),
        (("devices: [simulated]", "latency: no.json"), "there is no file or folder no.json"),
        (
            ("devices: [simulated]", "latency: {fit: no.json}"),
            "shoal.yaml, line 3: latency.fit: there is no file or folder no.json",
        ),
        (
            ("devices: [simulated]", "latency: {services: {chat: h100}}"),
            "nothing says how long steps of service code take",
        ),
        (
            (
                "devices: [simulated]",
                "latency: {services: {chat: h100, cod: h100}, roofline: {device: h100}}",
            ),
            "shoal.yaml, line 3: latency.services.cod: there is no such service, did you mean 'code'?",
        ),
        (
            ("devices: [simulated]", "latency: {roofline: {device: h100}, fit: x}"),
            "write one of fit, profile, roofline, got fit and roofline",
        ),
        (
            ("devices: [simulated]", "latency: {profile: ., data_parallel: 2}"),
            "only `shoal simulate` simulates such ranks",
        ),
        (
            ("devices: [simulated]", "latency: [h100]"),
            "shoal.yaml, line 3: latency: expected text, got a list",
        ),
    ],
)
def test_mistakes_are_told(tmp_path, lines, said):
    assert said in error_of(tmp_path, *lines)


def test_other_commands_need_a_model_that_computes(tmp_path):
    config = from_yaml(tmp_path, "services: [smollm2]\ndevices: ['simulated:h100']")
    with pytest.raises(ConfigError, match="only `shoal serve` runs simulated engines"):
        config.engine_options()


def test_an_added_engine_may_name_a_device_but_no_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    profile_in(tmp_path)
    for device in ({"device": "simulated:h100"}, {"device": SIMULATED, "latency": "h100"}):
        added, _ = read_added_engine(node_of(device, "the body"))
        assert (added.device, added.latency) == (SIMULATED, everywhere("h100"))
    for latency in ("latency.json", {"fit": "latency.json"}):
        with pytest.raises(ConfigError, match="the body: latency: "):
            read_added_engine(node_of({"device": SIMULATED, "latency": latency}, "the body"))
