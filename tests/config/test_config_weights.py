"""The memory for weights: its keys, those of devices and services, and what cannot be combined with it."""

import pytest
from config_builders import from_flags, from_yaml

from shoal.core import ConfigError, Service
from shoal.engine.options import EngineOptions
from shoal.schedule import ADMISSIONS, SchedulerOptions
from shoal.schedule.policies.residency import RESIDENCY_POLICIES
from shoal.schedule.weights_options import WeightsOptions

SERVICES = "services: [{name: chat, model: smollm2, pin: true}, {name: base, model: gemma3-270m}]"
MIB = 2**20


def config(tmp_path, *lines, **flags):
    return from_yaml(tmp_path, "\n".join((SERVICES, *lines)), **flags)


def error_of(tmp_path, *lines):
    with pytest.raises(ConfigError) as error:
        config(tmp_path, *lines).engine_plans()
    return str(error.value).replace(f"{tmp_path}/", "")


def test_all_keys_reach_the_engine(tmp_path):
    written = "weights: {memory: 2GiB, policy: fcfs, quantum: 500ms, max_absence: 4s, bandwidth: 200MB/s}"
    options = config(tmp_path, written).engine_options()
    assert options.weights == WeightsOptions(
        memory_bytes=2**31,
        policy=RESIDENCY_POLICIES["fcfs"](),
        quantum_s=0.5,
        max_absence_s=4,
        bandwidth=2e8,
    )
    assert [service.pin for service in options.services] == [True, False]


def test_without_the_section_all_weights_stay(tmp_path):
    options = config(tmp_path).engine_options()
    assert options.weights == EngineOptions(services=options.services).weights == WeightsOptions()
    assert options.weights.memory_bytes is None


@pytest.mark.parametrize("name", RESIDENCY_POLICIES)
def test_every_policy_is_known_by_name_and_as_a_mapping(tmp_path, name):
    for written in (name, f"{{policy: {name}}}"):
        weights = config(tmp_path, f"weights: {{policy: {written}}}").weights
        assert weights.policy == RESIDENCY_POLICIES[name]()


def test_a_device_may_have_another_size(tmp_path):
    devices = "devices: [cpu, {name: b, device: cpu, weights_memory: 64MiB}]"
    first, second = config(tmp_path, devices, "weights: {memory: 1GiB, quantum: 2s}").engine_plans()
    assert (first.options.weights.memory_bytes, second.options.weights.memory_bytes) == (2**30, 2**26)
    assert first.options.weights.quantum_s == second.options.weights.quantum_s == 2


def test_the_flag_sets_the_memory(tmp_path):
    assert from_flags("smollm2", "gemma3-270m", weights_memory="1GiB").weights.memory_bytes == 2**30
    assert config(tmp_path, "weights: {memory: 2GiB, quantum: 2s}", weights_memory="1MiB").weights == (
        WeightsOptions(memory_bytes=MIB, quantum_s=2)
    )


def test_a_service_is_pinned_by_a_flag():
    [service] = from_flags(services=("chat=smollm2,pin=true",)).services
    assert service.pin


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("weights: {memory: much}", "line 2: weights.memory: expected a size such as 512MB"),
        ("weights: {memory: 0}", "line 2: weights.memory: must be at least 1"),
        ("weights: {policy: fcsf}", "line 2: weights.policy: expected one of fcfs"),
        ("weights: {policy: fcsf}", "did you mean 'fcfs'?"),
        ("weights: {policy: 'fcfs:bound=1'}", "line 2: weights.policy.bound: unknown key"),
        ("weights: {quantum: 0}", "line 2: weights.quantum: must be more than 0s, got 0"),
        ("weights: {max_absence: long}", "line 2: weights.max_absence: expected a time such as 200ms"),
        ("weights: {bandwidth: fast}", "line 2: weights.bandwidth: expected bytes per second"),
        ("weights: {bandwidth: 0}", "line 2: weights.bandwidth: must be more than 0, got 0"),
        ("weights: {memroy: 1GiB}", "line 2: weights.memroy: unknown key, did you mean 'memory'?"),
        ("devices: [{device: cpu, weights_memory: x}]", "devices[0].weights_memory: expected a size"),
    ],
)
def test_mistakes_are_named_with_their_line(tmp_path, line, expected):
    assert expected in error_of(tmp_path, line)


@pytest.mark.parametrize(
    "where", ["weights: {memory: 1GiB}", "devices: [{device: cpu, weights_memory: 1GiB}]"]
)
def test_slices_are_refused_with_a_limit(tmp_path, where):
    error = error_of(tmp_path, where, "scheduler: {admission: slice}")
    assert error.startswith("weights.memory: an admission by slices cannot be used where weights leave")
    assert "scheduler.admission" in error
    config(tmp_path, "weights: {quantum: 2s}", "scheduler: {admission: slice}").engine_plans()


def test_recomputing_is_allowed_with_a_limit(tmp_path):
    config(tmp_path, "weights: {memory: 1GiB}", "scheduler: {preemption_mode: recompute}").engine_plans()


def test_slices_are_refused_in_python_too():
    with pytest.raises(ConfigError, match="slices"):
        EngineOptions(
            services=(Service(name="chat", model="smollm2"),),
            weights=WeightsOptions(memory_bytes=MIB),
            scheduler=SchedulerOptions(admission=ADMISSIONS["slice"]()),
        )
