"""Engines with a simulated device: the same tokens whatever happens, and the sizes of what they hold."""

import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from engine_pairs import Client, Migration, hosts
from hypothesis import given
from hypothesis import strategies as st

from shoal.core import ConfigError, FinishReason, ModelUnavailable, Request, SamplingParams, Service
from shoal.engine import Engine, EngineInfo, EngineOptions
from shoal.engine import build_engine as build_torch_engine
from shoal.engine.simulated.build import MEMORY_SHARE, build_engine
from shoal.forecast import ModelSpec, StepRows, model_spec
from shoal.forecast.device_specs import device_spec
from shoal.forecast.latency_sources import EngineLatency, RooflineLatency, RooflineOptions
from shoal.forecast.roofline import RooflineTimes
from shoal.models.folder.json_files import read_json
from shoal.schedule import WeightsOptions
from simulated_engines import EOS, VOCABULARY, constant_times, make_folder, simulated_options

pytestmark = pytest.mark.without_native

WEIGHT_BYTES = 4 * (2 * (64 * 16 * (2 * 4 + 2 * 2) + 3 * 64 * 128) + 2 * VOCABULARY * 64)
"""Of the model of ``make_folder``, in float32: matrices of two layers, embedding and output head."""
BLOCK_BYTES = 4 * (4 * 2 * 2 * 2 * 16)
"""Of four tokens: keys and values of two heads in two layers."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("models") / "tiny")


def build(options: EngineOptions, folder: Path) -> tuple[Engine, EngineInfo]:
    return build_engine(options, {service.name: folder for service in options.services})


def ask(name: str, prompt: int, output: int, service: str = "a", **params) -> Request:
    sampling = SamplingParams(**{"max_tokens": output, "temperature": 0.0} | params)
    tokens = [(7 * number + len(name)) % VOCABULARY for number in range(prompt)]
    return Request(id=name, service=service, prompt=tokens, sampling=sampling, seed=5)


def run(engine: Engine, *requests: Request) -> dict[str, list[int]]:
    """Output by request; every one ends by its limit."""
    engine.submit(*requests)
    tokens: dict[str, list[int]] = {request.id: [] for request in requests}
    while engine.busy:
        for event in engine.step():
            tokens[event.request_id] += event.tokens
            assert event.finish in (None, FinishReason.LENGTH)
        if engine.idle and engine.needs_polling:
            time.sleep(0.0005)  # while weights come
    engine._pool.check_integrity({})
    return tokens


def sheet(device: str, **options) -> EngineLatency:
    roofline = RooflineOptions(device=device_spec(device), **options)
    return EngineLatency(default=RooflineLatency(roofline=roofline))


def test_outputs_go_on_to_their_limits_without_end_tokens(folder):
    engine, _ = build(simulated_options(folder), folder)
    tokens = run(engine, *[ask(f"r{number}", 3 + number, 100) for number in range(20)])
    assert {len(output) for output in tokens.values()} == {100}
    said = {token for output in tokens.values() for token in output}
    assert said <= set(range(VOCABULARY)) - {EOS}
    assert len(said) > VOCABULARY / 2


def undisturbed(folder: Path, requests: list[Request], *names: str) -> dict[str, list[int]]:
    """Outputs of requests that run one after another, with room for all."""
    engine, _ = build(simulated_options(folder, *names), folder)
    return {name: output for request in requests for name, output in run(engine, request).items()}


def tight(folder: Path, blocks: int, caching: bool = True, **scheduler) -> Engine:
    """An engine with room for few blocks of four tokens."""
    kv = {"memory_bytes": blocks * BLOCK_BYTES, "prefix_caching": caching}
    engine, info = build(simulated_options(folder, kv=kv, **scheduler), folder)
    assert info.merged_blocks == blocks
    return engine


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_a_preempted_request_goes_on_as_if_nothing_had_been(folder, mode, depth):
    requests = [ask("a" * number, 6, 30, temperature=float(number % 2)) for number in range(1, 7)]
    engine = tight(folder, 14, preemption_mode=mode, depth=depth)
    assert run(engine, *requests) == undisturbed(folder, requests)
    stats = engine.stats().services["a"]
    assert stats.preemptions > 0
    assert (stats.swapped_tokens > 0) == (mode == "swap")


@given(
    st.fixed_dictionaries(
        {
            "max_batched_tokens": st.sampled_from([4, 16, 64]),
            "max_running": st.sampled_from([2, 8]),
            "preemption_mode": st.sampled_from(["recompute", "swap"]),
            "preempt_for_waiting": st.sampled_from(["never", "less-urgent"]),
        }
    ),
    st.sampled_from([(1, 1), (2, 1), (1, 6)]),
    st.integers(16, 40),
    st.booleans(),
    st.lists(st.tuples(st.integers(1, 40), st.integers(1, 20)), min_size=1, max_size=8),
)
def test_no_scheduler_changes_the_tokens(folder, scheduler, overlap, blocks, caching, sizes):
    depth, iterations = overlap
    requests = [
        ask(f"r{number}", prompt, output, temperature=float(number % 2))
        for number, (prompt, output) in enumerate(sizes)
    ]
    engine = tight(folder, blocks, caching, depth=depth, max_iterations=iterations, **scheduler)
    assert run(engine, *requests) == undisturbed(folder, requests)


@pytest.mark.parametrize("live", [True, False])
@pytest.mark.parametrize("depth", [1, 2])
def test_requests_move_between_engines_of_different_speed(folder, depth, live):
    requests = [ask("moves", 21, 24), ask("moves too", 9, 24, temperature=1.0)]
    expected = undisturbed(folder, requests)
    engines = [
        build(simulated_options(folder, step_s=step_s, depth=depth), folder) for step_s in (1e-6, 5e-5)
    ]
    formats = {info.services["a"].kv_format for _, info in engines}
    assert len(formats) == 1
    assert formats != {""}
    with hosts(*[engine for engine, _ in engines]) as (source, destination):
        for at in (1, 5, 20):
            client = Client(source, destination, [Migration(request, at, live) for request in requests])
            client.submit(source, *requests)
            client.run()
            assert {name: answer.tokens for name, answer in client.answers.items()} == expected
        assert source.is_free
        assert destination.is_free


def test_a_request_is_resumed_from_its_tokens(folder):
    request = ask("r", 10, 30, temperature=1.0)
    expected = undisturbed(folder, [request])["r"]
    first, _ = build(simulated_options(folder), folder)
    first.submit(request)
    events = [event for _ in range(12) for event in first.step()]
    begun = [token for event in events for token in event.tokens]
    left = first.detach("r")
    assert left is not None
    assert 0 < len(left.output_tokens) < 30
    second, _ = build(simulated_options(folder, max_batched_tokens=4), folder)
    assert list(left.output_tokens) + run(second, left)["r"] == expected
    assert begun == expected[: len(begun)]


def test_services_share_an_engine_and_come_and_go(folder):
    engine, info = build(simulated_options(folder, "a", "b"), folder)
    expected = undisturbed(folder, [ask("r", 5, 40), ask("s", 9, 40)])
    assert info.weight_bytes == WEIGHT_BYTES, "services on one model share its weights"
    requests = [ask("r", 5, 40), ask("s", 9, 40, "b")]
    assert run(engine, *requests) == expected
    added = engine.add_service(Service(name="c", model="c", weights="random"), folder)
    removed = engine.remove_service("b", drain=True)
    while not (added.done() and removed.done()):
        engine.step()
    assert added.result().simulated
    assert engine.weight_bytes == WEIGHT_BYTES
    assert run(engine, ask("r", 5, 40, "c")) == {"r": expected["r"]}


def test_weights_come_and_go(folder):
    other = make_folder(folder.parent / "other", hidden_size=32)
    weights = WeightsOptions(memory_bytes=WEIGHT_BYTES, bandwidth=1e9, quantum_s=0.001)
    options = simulated_options(folder, "a", "b", weights=weights)
    engine, info = build_engine(options, {"a": folder, "b": other})
    requests = [ask(f"r{number}", 5, 40, "ab"[number % 2]) for number in range(6)]
    assert run(engine, *requests) == undisturbed(folder, requests, "a", "b")
    assert any(service.weights.evictions for service in engine.stats().services.values())
    assert info.services["b"].weight_bytes < info.services["a"].weight_bytes == WEIGHT_BYTES
    with pytest.raises(
        ConfigError, match=r"nothing says how fast weights of service a come; write weights\.ba"
    ):
        build(simulated_options(folder, weights=WeightsOptions(memory_bytes=WEIGHT_BYTES)), folder)


def test_the_pool_is_what_the_weights_leave_of_the_device(folder):
    kv = {"memory_bytes": None, "block_size": 64}
    shared = int(MEMORY_SHARE * device_spec("rtx-3090").memory_bytes)
    _, info = build(simulated_options(folder, kv=kv, latency=sheet("rtx-3090")), folder)
    assert shared - WEIGHT_BYTES - 2**20 < info.kv_bytes <= shared - WEIGHT_BYTES
    _, info = build(simulated_options(folder, kv=kv), folder)
    assert 2**31 - 2**20 < info.kv_bytes <= 2**31, "where the device is not known"


def test_another_model_may_be_simulated_than_that_of_the_folder(folder):
    """Its steps, weights and KV count; text, vocabulary and context are those of the folder."""
    llama = model_spec("llama-3.1-8b")
    kv = {"memory_bytes": None, "block_size": 64}
    latency = sheet("a100-80", model=llama, tp=2)
    engine, info = build(simulated_options(folder, kv=kv, latency=latency), folder)
    service = info.services["a"]
    assert service.weight_bytes == info.weight_bytes == llama.weight_bytes()
    usable = 2 * int(MEMORY_SHARE * device_spec("a100-80").memory_bytes) - llama.weight_bytes()
    assert service.kv_tokens == pytest.approx(usable / llama.kv_bytes_per_token(), rel=0.01)
    assert (service.vocab_size, service.context_tokens) == (VOCABULARY, 512)
    rows = StepRows(3, 90, ((20, 0),), 4)
    expected = RooflineTimes(llama, device_spec("a100-80"), 2).step_time(rows)
    assert engine._executor._device.models["a"].times.step_time(rows) == expected
    with pytest.raises(
        ConfigError, match=r"the weights take 1\d\d.. GiB, and 21.6 GiB of the simulated rtx-4090"
    ):
        build(
            simulated_options(folder, kv=kv, latency=sheet("rtx-4090", model=model_spec("llama-2-70b"))),
            folder,
        )


def test_step_times_are_those_of_the_model_in_its_dtype(folder):
    spec = ModelSpec.from_config(read_json(folder / "config.json"), folder.name)
    options = simulated_options(folder, latency=sheet("h100"))
    halved = replace(options, services=(replace(options.services[0], dtype="bfloat16"),))
    for asked, size in ((options, 4.0), (halved, 2.0)):
        engine, info = build(asked, folder)
        expected = RooflineTimes(
            replace(spec, weight_bytes_each=size, kv_bytes_each=size), device_spec("h100")
        )
        rows = StepRows(3, 90, ((20, 0),), 4)
        assert engine._executor._device.models["a"].times.step_time(rows) == expected.step_time(rows)
        assert info.services["a"].weight_bytes == WEIGHT_BYTES * size / 4
        assert info.services["a"].dtype == {4.0: "float32", 2.0: "bfloat16"}[size]


def test_engines_of_different_speed_are_different_devices(folder):
    """So that speeds which were measured of one are not taken for another's."""
    options = [simulated_options(folder, latency=sheet(device)) for device in ("h100", "v100", "h100")]
    devices = [build(each, folder)[1].device for each in options]
    assert devices == [f"simulated (data sheet of {name})" for name in ("h100", "v100", "h100")]


def test_the_speed_of_a_service_is_measured_as_on_any_engine(folder):
    engine, info = build(simulated_options(folder, step_s=0.004), folder)
    speed = engine.measure_speed(info.services["a"], "a", compiles=True)
    assert speed.decode_s >= 0.004


def test_what_cannot_be_is_refused(folder):
    options = simulated_options(folder)
    with pytest.raises(ModelUnavailable, match="no model folder was given for a"):
        build_engine(options, {})
    with pytest.raises(ConfigError, match="only `shoal serve` runs such engines"):
        build_torch_engine(options, {"a": folder})
    long = replace(options, services=(replace(options.services[0], max_model_len=513),))
    with pytest.raises(ConfigError, match="max_model_len 513 is beyond the model's context of 512 tokens"):
        build(long, folder)
    with pytest.raises(ConfigError, match="nothing says how long its steps take"):
        EngineOptions(services=options.services, device="simulated")
    with pytest.raises(ConfigError, match="latency is of simulated devices only, and device is cpu"):
        EngineOptions(services=options.services, latency=options.latency)
    named = EngineLatency(services={"b": constant_times(folder, 1e-6)})
    with pytest.raises(ConfigError, match="nothing says how long steps of service a take"):
        simulated_options(folder, latency=named)


def test_no_torch_is_imported(folder):
    code = (
        "import sys; from pathlib import Path; sys.path.append(sys.argv[1])\n"
        "import shoal.engine.process.server\n"
        "from shoal.engine.simulated.build import build_engine\n"
        "from simulated_engines import simulated_options\n"
        "folder = Path(sys.argv[2])\n"
        "build_engine(simulated_options(folder), {'a': folder})[0].close()\n"
        "assert not {'torch', 'transformers'} & sys.modules.keys()"
    )
    tests = Path(__file__).parents[1]
    subprocess.run([sys.executable, "-c", code, str(tests), str(folder)], check=True)
