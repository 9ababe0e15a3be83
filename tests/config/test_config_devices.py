"""Several engines: their devices, services and shares of what they use by default."""

from pathlib import Path

import pytest
from config_builders import from_flags, from_yaml

from shoal.cluster.options import ClusterOptions, RestartOptions
from shoal.config import load_config, settings
from shoal.config.devices import EngineDevice
from shoal.core import ConfigError
from shoal.serve import ServerOptions

EXAMPLE = Path(__file__).parents[2] / "examples" / "cluster.yaml"

TWO = "devices: [cpu, {name: b, device: cpu, threads: 1, kv_memory: 64MiB}]"
SERVICES = "services: [{name: chat, model: smollm2}, {name: base, model: gemma3-270m}]"


def plans(tmp_path, *lines):
    return from_yaml(tmp_path, "\n".join((SERVICES, *lines))).engine_plans()


def placed(plans):
    return {plan.name: [service.name for service in plan.options.services] for plan in plans}


def error_of(tmp_path, *lines):
    with pytest.raises(ConfigError) as error:
        plans(tmp_path, *lines)
    return str(error.value).replace(f"{tmp_path}/", "")


def test_every_device_has_an_engine(tmp_path):
    first, second = plans(tmp_path, TWO, "kv_cache: {memory: 1GiB, block_size: 8}", "threads: 3")
    assert (first.name, second.name) == ("0", "b")
    assert (first.options.threads, second.options.threads) == (3, 1)
    assert (first.options.kv_cache.memory_bytes, second.options.kv_cache.memory_bytes) == (2**30, 2**26)
    assert first.options.kv_cache.block_size == second.options.kv_cache.block_size == 8


def test_one_engine_uses_all_cores(tmp_path):
    config = from_yaml(tmp_path, SERVICES)
    [plan] = config.engine_plans()
    assert (plan.name, plan.options) == ("0", config.engine_options())
    assert (plan.options.threads, plan.options.memory_share) == (None, 1.0)
    assert config.cluster == ClusterOptions()


def test_a_device_may_be_given_repeatedly():
    config = from_flags("smollm2", device=("cpu", "cpu", "cuda:1"))
    assert config.devices == (
        EngineDevice(device="cpu", name="0"),
        EngineDevice(device="cpu", name="1"),
        EngineDevice(device="cuda:1", name="2"),
    )


@pytest.mark.parametrize(("cores", "threads"), [(1, 1), (2, 1), (3, 1), (8, 3), (9, 4)])
def test_engines_share_all_cores_but_one(tmp_path, monkeypatch, cores, threads):
    monkeypatch.setattr(settings, "default_threads", lambda: cores)
    assert [plan.options.threads for plan in plans(tmp_path, "devices: [cpu, cpu]")] == [threads, threads]


def test_engines_on_one_device_share_its_memory(tmp_path):
    shares = {
        plan.name: plan.options.memory_share
        for plan in plans(tmp_path, "devices: [cpu, {name: b, device: cpu}, cuda:0, cuda:1, cpu]")
    }
    assert shares == {"0": 1 / 3, "b": 1 / 3, "2": 1, "3": 1, "4": 1 / 3}


def test_ray_engines_do_not_share_this_machine(tmp_path):
    first, second = plans(tmp_path, TWO, "cluster: {backend: ray, address: 10.0.0.1:6379}")
    assert [plan.options.threads for plan in (first, second)] == [None, 1]
    assert [plan.options.memory_share for plan in (first, second)] == [1.0, 1.0]


def test_services_are_on_every_engine_unless_placed(tmp_path):
    assert placed(plans(tmp_path, TWO)) == {"0": ["chat", "base"], "b": ["chat", "base"]}
    assert placed(plans(tmp_path, TWO, "placement: {chat: [b]}")) == {"0": ["base"], "b": ["chat", "base"]}
    assert placed(plans(tmp_path, TWO, "placement: {chat: [0, b], base: 0}")) == {
        "0": ["chat", "base"],
        "b": ["chat"],
    }


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (("devices: []",), "shoal.yaml, line 2: devices: name at least one device: cpu or cuda:0"),
        (
            ("devices: [{name: b}]",),
            "shoal.yaml, line 2: devices[0].device: missing; write `cpu`, `cuda:N` or `simulated`",
        ),
        (("devices: [{device: cpu, nam: b}]",), "devices[0].nam: unknown key, did you mean 'name'?"),
        (
            ("devices: [{device: cpu, name: a/b}]",),
            "shoal.yaml, line 2: devices[0]: an engine's name has up to 32 letters, digits",
        ),
        (
            ("devices: [cpu, {device: cpu, name: 0}]",),
            "shoal.yaml, line 2: devices[1].name: there is already an engine named '0'",
        ),
        (("devices: [{device: cpu, threads: 0}]",), "devices[0].threads: must be at least 1, got 0"),
        (("devices: [{device: cpu, kv_memory: 0}]",), "devices[0].kv_memory: must be at least 1, got 0"),
        (
            (TWO, "placement:", "  chat: [0]", "  bas: [b]"),
            "shoal.yaml, line 5: placement.bas: there is no such service, did you mean 'base'?",
        ),
        (
            (TWO, "placement: {chat: [0, 1]}"),
            "shoal.yaml, line 3: placement.chat[1]: there is no engine '1'; possible: 0, b",
        ),
        ((TWO, "placement: {chat: [b, b]}"), "placement.chat[1]: engine 'b' is named twice"),
        ((TWO, "placement: {chat: []}"), "placement.chat: name at least one engine; possible: 0, b"),
        ((TWO, "placement: [b]"), "placement: expected keys and values, got a list"),
        (
            (TWO, "placement: {chat: [0], base: [0]}"),
            "shoal.yaml, line 3: placement: engine 'b' has no service: name it for one of chat, base",
        ),
    ],
)
def test_mistakes_are_told_with_their_place(tmp_path, lines, expected):
    assert expected in error_of(tmp_path, *lines)


def test_commands_of_one_engine_refuse_several(tmp_path):
    config = from_yaml(tmp_path, f"{SERVICES}\n{TWO}")
    with pytest.raises(ConfigError, match=r"devices: write exactly one device for this command, got 2 \(cpu"):
        config.engine_options()


def test_the_cluster_s_options(tmp_path):
    text = (
        "cluster: {name: mine, dispatch: round-robin, heartbeat: 500ms, hung_after: 2s, step_timeout: 1m, "
        "load_timeout: 5m, "
        "restart: {first: 100ms, factor: 3, max: 10s}, orphan_after: 0, wait_for_engine: 1.5m}"
    )
    assert from_yaml(tmp_path, f"{SERVICES}\n{text}").cluster == ClusterOptions(
        name="mine",
        dispatch="round-robin",
        heartbeat_s=0.5,
        hung_after_s=2,
        step_timeout_s=60,
        load_timeout_s=300,
        restart=RestartOptions(first_s=0.1, factor=3, max_s=10),
        orphan_after_s=0,
        wait_for_engine_s=90,
    )


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("hung_after: 2s", "cluster.hung_after must be at least three heartbeats (3 s), got 2 s"),
        ("step_timeout: 2s", "cluster.step_timeout must be at least three heartbeats (3 s), got 2 s"),
        ("load_timeout: 0s", "cluster.load_timeout must be at least three heartbeats (3 s), got 0 s"),
        ("dispatch: lest-requests", "got 'lest-requests', did you mean 'least-requests'?"),
        ("backend: kubernetes", "cluster.backend: expected one of local, ray, got 'kubernetes'"),
        ("restart: {factor: 0.5}", "cluster.restart.factor must be at least 1, got 0.5"),
        ("name: ../mine", "cluster.name has up to 32 letters, digits"),
        ("heart_beat: 1s", "cluster.heart_beat: unknown key, did you mean 'heartbeat'?"),
    ],
)
def test_mistakes_in_the_cluster_s_options(tmp_path, written, expected):
    assert expected in error_of(tmp_path, f"cluster: {{{written}}}")


def test_the_example_loads():
    config = load_config(ServerOptions, file=EXAMPLE)
    plans = config.engine_plans()
    assert placed(plans) == {"0": ["chat", "complete"], "b": ["chat"]}
    assert [plan.options.kv_cache.memory_bytes for plan in plans] == [2**28, 2**26]
    assert config.cluster.name == "example"
