"""Scenarios of more weights than fit: sizes from models, bandwidths from data sheets, and the run itself."""

import pytest
from config_builders import scenario, settings
from test_config_scenario import WORK, profile

from shoal.config import prepare
from shoal.config.flags import flag_settings
from shoal.config.scenario_flags import SCENARIO_FLAGS
from shoal.core import ConfigError
from shoal.forecast.device_specs import DEVICE_SPECS, device_spec
from shoal.forecast.model_spec import model_spec

GIB = 2**30
SERVICES = "services: [{name: a, model: llama-3.1-8b, pin: true}, {name: b, model: llama-2-7b}, qwen3-8b]\n"
DEVICE = "latency: {roofline: {device: a100-80}}\n"
LIMIT = "weights: {memory: 40GiB}\n"


def engine(tmp_path, *lines):
    return prepare(scenario(tmp_path, "".join([WORK, *lines]))).engine


def test_sizes_and_pins_are_those_of_the_models(tmp_path):
    services = engine(tmp_path, SERVICES, DEVICE, LIMIT).services
    sizes = {name: service.weight_bytes for name, service in services.items()}
    assert sizes == {
        "a": model_spec("llama-3.1-8b").weight_bytes(),
        "b": model_spec("llama-2-7b").weight_bytes(),
        "qwen3-8b": model_spec("qwen3-8b").weight_bytes(),
    }
    assert [service.pinned for service in services.values()] == [True, False, False]


def test_each_of_several_devices_has_its_part(tmp_path):
    halves = engine(tmp_path, SERVICES, "latency: {roofline: {device: a100-80, tp: 2}}\n", LIMIT)
    assert halves.services["a"].weight_bytes == model_spec("llama-3.1-8b").weight_bytes(2)


def test_the_rate_is_that_of_the_data_sheet_or_the_bandwidth_if_that_is_less(tmp_path):
    seconds = {}
    for name, weights in (
        ("sheet", LIMIT),
        ("less", "weights: {memory: 40GiB, bandwidth: 5GB/s}\n"),
        ("more", "weights: {memory: 40GiB, bandwidth: 500GB/s}\n"),
    ):
        seconds[name] = engine(tmp_path, SERVICES, DEVICE, weights).fetch_times.seconds["b"]
    size = model_spec("llama-2-7b").weight_bytes()
    assert seconds == {"sheet": size / 25e9, "less": size / 5e9, "more": size / 25e9}


def test_every_data_sheet_has_a_rate():
    rates = {name: spec.host_bytes_per_s / 1e9 for name, spec in DEVICE_SPECS.items()}
    assert rates.items() >= {"a100-80": 25, "h100": 50, "h200": 50, "v100": 12}.items()
    assert all(1e9 < spec.host_bytes_per_s < spec.bandwidth for spec in DEVICE_SPECS.values())


def test_the_pool_has_what_the_memory_for_weights_leaves(tmp_path):
    usable = int(device_spec("a100-80").memory_bytes * 0.9)
    layout = engine(tmp_path, SERVICES, DEVICE, LIMIT).layout
    assert usable - 40 * GIB - 2**24 < layout.total_bytes <= usable - 40 * GIB
    larger = engine(tmp_path, SERVICES, DEVICE, "weights: {memory: 70GiB}\n")
    assert larger.layout == engine(tmp_path, SERVICES, DEVICE).layout, "more than the models take is not kept"


def test_a_limited_run_shows_what_came_and_went(tmp_path):
    work = "workload: {lengths: {prompt: 100, output: 20}, rate: 2, requests: 40}\n"
    services = SERVICES.replace(", pin: true", "")
    text = work + services + DEVICE + "weights: {memory: 16GiB, policy: fcfs, slowdown: 1.1}\n"
    prepared = prepare(scenario(tmp_path, text))
    assert prepared.facts["weights"] == (
        "16.0 GiB for 42.8 GiB, policy fcfs, fetched at 25GB/s, steps x 1.1 meanwhile"
    )
    record = prepared.run()
    assert all(row.answered for row in record.requests)
    totals = record.engines[0].weights
    assert set(totals) == {"a", "b", "qwen3-8b"}
    assert all(each.fetches > 1 for each in totals.values())
    assert sum(each.fetches - each.evictions for each in totals.values()) == 1
    assert prepared.run(skip_ahead=False) == record


def test_without_a_limit_no_weights_are_counted(tmp_path):
    prepared = prepare(scenario(tmp_path, WORK + SERVICES + DEVICE))
    assert "weights" not in prepared.facts
    assert not prepared.run().engines[0].weights


def test_the_flag_sets_the_memory(tmp_path):
    flags = flag_settings({"weights-memory": "40GiB"}, flags=SCENARIO_FLAGS)
    assert scenario(tmp_path, WORK + SERVICES + DEVICE, flags).weights.memory_bytes == 40 * GIB
    assert settings(weights_memory="40GiB").entries["weights"]


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ("weights: {memory: 20GiB}\n", "weights.memory: "),  # 14.96 GiB are pinned
        (LIMIT + "scheduler: {admission: slice}\n", "weights.memory: an admission by slices"),
        ("weights: {slowdown: 0.5}\n", "weights.slowdown: must be at least 1"),
        ("weights: {host: 1GiB}\n", "weights.host: unknown key"),
    ],
)
def test_mistakes(tmp_path, lines, expected):
    with pytest.raises(ConfigError) as error:
        prepare(scenario(tmp_path, WORK + SERVICES + DEVICE + lines)).run()
    assert expected in str(error.value)


def test_sizes_and_rates_must_be_known(tmp_path):
    profile(tmp_path, "a", "b")
    fitted = "latency: {fit: latency.json}\nkv_cache: {tokens: 1600}\nservices: [{name: a}, {name: b}]\n"
    with pytest.raises(ConfigError, match=r"write weights\.bandwidth"):
        prepare(scenario(tmp_path, WORK + fitted + LIMIT))
    limit = "weights: {memory: 40GiB, bandwidth: 5GB/s}\n"
    with pytest.raises(ConfigError, match="size of the weights of a, b is not known"):
        prepare(scenario(tmp_path, WORK + fitted + limit))


def test_too_small_a_device_is_told_of_the_limit(tmp_path):
    small = "latency: {roofline: {device: rtx-4090}}\n"
    with pytest.raises(ConfigError, match=r"or write weights\.memory: less of them"):
        engine(tmp_path, SERVICES, small)
    assert engine(tmp_path, SERVICES.replace(", pin: true", ""), small, "weights: {memory: 16GiB}\n")
