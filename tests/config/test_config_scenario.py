"""Scenarios: every key, and the KV pools, execution times and facts that follow from them."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from config_builders import from_yaml, scenario

from shoal.cluster.batching_options import BatchingOptions
from shoal.cluster.fleet_options import FleetOptions
from shoal.cluster.options import PackingOptions
from shoal.cluster.packing import MigrationBudgets, PackerTuning, Priority
from shoal.config import flag_settings, load_scenario, prepare
from shoal.config.scenario import Incident
from shoal.config.scenario_file import scenario_section
from shoal.config.scenario_flags import SCENARIO_FLAGS
from shoal.config.scenario_pool import capacity
from shoal.config.scenario_run import time_alone
from shoal.core import SLO, ConfigError
from shoal.core.cluster import Link
from shoal.core.units import LONGEST_S
from shoal.forecast import FittedTimes, LatencyModel, LatencyProfile, StepRows, save_profile
from shoal.forecast.device_specs import device_spec
from shoal.forecast.latency_sources import FitLatency, RooflineLatency
from shoal.forecast.model_spec import ModelSpec, model_spec
from shoal.forecast.roofline import RooflineTimes, kv_tokens
from shoal.schedule import Fcfs, Oracle
from shoal.schedule.policies.residency import FcfsResidency
from shoal.workload import LENGTHS, AtOnce, FixedLength, Gamma, Poisson, Replay, UniformLength, Weibull

LLAMA = "latency: {roofline: {model: llama-3.1-8b, device: a100-80}}\n"
FITTED = "latency: {fit: latency.json}\n"
WORK = "workload: {lengths: {prompt: 100, output: 20}, rate: 2, requests: 10}\n"
COSTS = LatencyModel(constant_s=0.01, sequence_s=1e-3, token_s=1e-4, context_s=1e-6, work_s=1e-7)

EVERYTHING = """\
engines: 3
dispatch: least-loaded
sample: 250ms
link: {bandwidth: 1e9, latency: 250ms}
drains: [{engine: 2, at: 20s}, {engine: 0, at: 1m}]
deaths: {engine: 1, at: 30s}
load: 5s
latency: {fit: latency.json, service: chat, tp: 1}
kv_cache:
  {memory: 40GiB, utilisation: 80%, reserved: 1GiB, block_size: 32, layout: split, swap: 64GiB,
   swap_bytes_per_s: 2e9, prefix_caching: false}
scheduler: {preset: vllm, admission: oracle, lengths: oracle, starvation: never, max_running: 8}
weights: {memory: 20GiB, policy: fcfs, quantum: 500ms, max_absence: 5s, bandwidth: 10GB/s, slowdown: 1.2}
batching:
  former: scls
  interval: 2s
  load_factor: 20%
  slice: 64
  max_batch: 12
  trust_predictions: true
  longest_first: true
  lengths: oracle
  memory_share: 80%
fleet: {min: 1, max: 2, idle: 30s, kv_share: 70%, requests: 16, attainment: 95%}
packing:
  epoch: 2s
  budgets: {engine: 1GiB, host: 2GiB, prefill_tokens: 500}
  tuning: {headroom: 1%, relief: 2%, spare: 3%, threshold: 4%, priority: {idle: 2, requests: 3, distance: 4}}
services:
  - {name: chat, model: shape, dtype: float32, context: 4096, slo: {ttft: 2s, e2e_scale: 5}, quota: 4,
     starvation: never, pin: true}
  - {name: code, model: meta-llama/Llama-3.1-8B-Instruct, execution: 1.2s,
     latency: {roofline: {model: llama-3.1-8b, device: RTX 4090, tp: 1}}}
workload:
  {trace: trace.csv, format: timed-lengths, requests: 7, seed: 3, time_scale: 0.5, max_tokens: 9,
   lengths: {prompt: {distribution: uniform, low: 5, high: 9}, output: 4},
   arrivals: {process: weibull, rate: 2, cv: 3}, services: {chat: 75%, code: 0.25}}
"""


def profile(folder: Path, *names: str) -> None:
    models = {(name, 1): replace(COSTS, constant_s=0.01 * (n + 1)) for n, name in enumerate(names)}
    save_profile(LatencyProfile(device="cpu", threads=2, models=models), folder / "latency.json")


def trace(folder: Path, *rows: tuple[float, int, int]) -> None:
    lines = [f"{prompt},{output},{arrival}" for arrival, prompt, output in rows]
    head = "prompt_tokens,output_tokens,arrival_s"
    (folder / "trace.csv").write_text("\n".join([head, *lines]) + "\n")


def test_drains_and_deaths_change_a_run(tmp_path):
    profile(tmp_path, "default")
    text = (
        "latency: {fit: latency.json}\nservices: [{name: default, model: llama-3.1-8b}]\nengines: 2\n"
        "kv_cache: {memory: 4GiB}\nworkload: {lengths: {prompt: 100, output: 50}, rate: 5, requests: 40}\n"
    )
    plain = prepare(scenario(tmp_path, text))
    assert {row.engine for row in plain.run().requests} == {0, 1}
    drained = prepare(scenario(tmp_path, text + "drains: {engine: 0, at: 1s}\n"))
    assert drained.facts["incidents"] == "engine 0 is drained after 1s"
    record = drained.run()
    assert set(record.moves) == {"tokens"}
    linked = prepare(
        scenario(tmp_path, text + "drains: {engine: 0, at: 1s}\nlink: {bandwidth: 1e9, latency: 1ms}\n")
    )
    assert "link" in linked.facts
    assert set(linked.run().moves) == {"live"}
    died = prepare(scenario(tmp_path, text + "deaths: {engine: 0, at: 1s}\nload: 2s\n")).run()
    assert any(row.recomputed_tokens for row in died.requests)
    assert all(row.answered for row in [*record.requests, *died.requests])


def test_every_key_is_read(tmp_path):
    (tmp_path / "shape").mkdir()
    shape = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 100}
    (tmp_path / "shape" / "config.json").write_text(json.dumps(shape | {"num_key_value_heads": 2}))
    trace(tmp_path, (0, 5, 5))
    profile(tmp_path, "chat")
    read = scenario(tmp_path, EVERYTHING)
    assert (read.engines, read.dispatch, read.sample_s, read.title) == (3, "least-loaded", 0.25, "scenario")
    assert read.latency == FitLatency(fit=tmp_path / "latency.json", service="chat", tp=1)
    pool = read.kv_cache
    assert (pool.memory_bytes, pool.utilisation, pool.reserved_bytes) == (40 * 2**30, 0.8, 2**30)
    assert (pool.block_size, pool.layout) == (32, "split")
    assert (pool.swap_bytes, pool.swap_bytes_per_s, pool.prefix_caching) == (64 * 2**30, 2e9, False)
    assert (read.preset, read.scheduler.order, read.scheduler.admission) == ("vllm", Fcfs(), Oracle())
    assert (read.scheduler.lengths, read.scheduler.starvation_s) == ("oracle", LONGEST_S)
    assert read.scheduler.max_running == 8
    budgets = MigrationBudgets(engine_bytes=2**30, host_bytes=2**31, prefill_tokens=500)
    priority = Priority(idle=2, requests=3, distance=4)
    tuning = PackerTuning(headroom=0.01, relief=0.02, spare=0.03, threshold=0.04, priority=priority)
    assert read.packing == PackingOptions(epoch_s=2, budgets=budgets, tuning=tuning)
    assert read.batching == BatchingOptions(
        former="scls",
        interval_s=2,
        load_factor=0.2,
        slice_tokens=64,
        max_batch=12,
        trust_predictions=True,
        longest_first=True,
        lengths="oracle",
        memory_share=0.8,
    )
    assert read.fleet == FleetOptions(min=1, max=2, idle_s=30, kv_share=0.7, requests=16, attainment=0.95)
    assert read.link == Link(bytes_per_s=1e9, latency_s=0.25)
    weights = read.weights
    assert (weights.memory_bytes, weights.policy) == (20 * 2**30, FcfsResidency())
    assert (weights.quantum_s, weights.max_absence_s) == (0.5, 5)
    assert (weights.bandwidth, weights.slowdown) == (1e10, 1.2)
    assert read.drains == (Incident(engine=2, at_s=20), Incident(engine=0, at_s=60))
    assert (read.deaths, read.load_s) == ((Incident(engine=1, at_s=30),), 5)
    chat, code = read.services
    assert chat.model == ModelSpec.from_config(shape | {"num_key_value_heads": 2}, "shape")
    assert (chat.dtype, chat.context_tokens, chat.quota, chat.pin) == ("float32", 4096, 4, True)
    assert (chat.starvation_s, code.starvation_s) == (LONGEST_S, None)
    assert chat.slo == SLO(ttft_s=2, e2e_scale=5)
    assert chat.latency is None
    assert not code.pin
    assert (code.model, code.execution_s) == (model_spec("llama-3.1-8b"), 1.2)
    assert isinstance(code.latency, RooflineLatency)
    assert code.latency.roofline.device == device_spec("rtx-4090")
    work = read.workload
    assert (work.trace, work.format, work.requests, work.seed) == (
        tmp_path / "trace.csv",
        "timed-lengths",
        7,
        3,
    )
    assert (work.time_scale, work.max_tokens, work.services) == (0.5, 9, {"chat": 0.75, "code": 0.25})
    assert (work.lengths.prompt, work.lengths.output) == (UniformLength(5, 9), FixedLength(4))
    assert work.arrivals == Weibull(2, 3)


def test_the_file_above_has_every_key():
    """Except keys that exclude others (tested below), and the scheduler's keys, which servers have, too."""
    keys = {path for path, _ in scenario_section().walk() if not path.startswith("scheduler.")}
    excluded = {"kv_cache.tokens", "kv_cache.blocks", "workload.rate", "workload.clients"}
    goals = {"services[].slo.tpot", "services[].slo.mtpot", "services[].slo.e2e"}
    words = {path: path.split(".")[-1] for path in keys - excluded - goals}
    assert [path for path, word in words.items() if f"{word}:" not in EVERYTHING] == []


@pytest.mark.parametrize(
    ("workload", "arrivals"),
    [
        ("{lengths: sharegpt, requests: 5, rate: 4}", Poisson(4)),
        (
            "{lengths: sharegpt, requests: 5, arrivals: {process: gamma, rate: 1, cv: 2}, rate: 4}",
            Gamma(4, 2),
        ),
        ("{trace: trace.csv, rate: 4}", Replay(rate=4)),
        ("{trace: trace.csv, arrivals: {process: replay, time_scale: 2}, rate: 4}", Replay(rate=4)),
        ("{trace: trace.csv, arrivals: replay:time_scale=2}", Replay(2)),
        ("{trace: trace.csv, arrivals: at-once}", AtOnce()),
        ("{trace: turns.csv, rate: 4}", Poisson(4)),
        ("{trace: empty.csv, rate: 4}", Poisson(4)),
    ],
)
def test_a_rate_applies_to_traces_and_arrival_processes(tmp_path, workload, arrivals):
    trace(tmp_path, (0, 5, 5), (1, 5, 5), (3, 5, 5))
    (tmp_path / "turns.csv").write_text("conv,turn,role,tokens\na,0,user,5\na,1,assistant,6\n")
    (tmp_path / "empty.csv").write_text("")
    read = scenario(tmp_path, f"{LLAMA}workload: {workload}\n")
    assert read.workload.arrivals == arrivals
    prepare(read)


def test_never_is_a_time_in_servers(tmp_path):
    assert (
        from_yaml(tmp_path, "services: [m]\nscheduler: {starvation: never}").scheduler.starvation_s
        == LONGEST_S
    )


def test_flags_go_over_the_file(tmp_path):
    trace(tmp_path, (0, 5, 5))
    values = {
        "trace": str(tmp_path / "trace.csv"), "requests": "3", "seed": "9", "engines": "2", "preset": "vllm",
        "kv-tokens": "320", "model": "qwen3-8b", "starvation": "5s",
    }  # fmt: skip
    flags = flag_settings(values, flags=SCENARIO_FLAGS)
    read = scenario(
        tmp_path, f"{LLAMA}{WORK}engines: 5\nscheduler: {{preset: orca, max_running: 3}}\n", flags
    )
    assert (read.engines, read.preset, read.kv_cache.tokens) == (2, "vllm", 320)
    assert (read.scheduler.max_running, read.scheduler.starvation_s) == (3, 5)
    assert (read.workload.requests, read.workload.seed) == (3, 9)
    assert isinstance(read.latency, RooflineLatency)
    assert read.latency.roofline.model == model_spec("qwen3-8b")
    assert read.latency.roofline.device == device_spec("a100-80")


@pytest.mark.parametrize(
    ("file", "flags", "expected"),
    [
        (
            "{lengths: sharegpt, arrivals: {process: gamma, rate: 3, cv: 2}, requests: 2, seed: 5}",
            {"trace": "trace.csv"},
            {"lengths": None, "arrivals": None, "requests": 2, "seed": 5},
        ),
        (
            "{trace: trace.csv, time_scale: 2, clients: 4}",
            {"rate": "3"},
            {"arrivals": Replay(rate=3), "clients": None},
        ),
        ("{trace: trace.csv, rate: 2}", {"clients": "3"}, {"arrivals": None, "clients": 3}),
        ("{trace: trace.csv}", {"workload": "sharegpt"}, {"lengths": LENGTHS["sharegpt"]}),
    ],
)
def test_a_flag_removes_keys_that_it_excludes(tmp_path, monkeypatch, file, flags, expected):
    monkeypatch.chdir(tmp_path)
    trace(tmp_path, (0, 5, 5), (1, 5, 5), (2, 5, 5))
    table = flag_settings(flags, flags=SCENARIO_FLAGS)
    read = scenario(tmp_path, f"{LLAMA}workload: {file}\n", table)
    assert {key: getattr(read.workload, key) for key in expected} == expected
    assert prepare(read).requests


def test_a_size_or_a_device_in_a_flag_replaces_another(tmp_path):
    profile(tmp_path, "chat")
    values = {"kv-memory": "1GiB", "device": "h100", "model": "qwen3-8b"}
    text = f"latency: {{fit: latency.json, tp: 2}}\n{WORK}kv_cache: {{blocks: 60, block_size: 32}}\n"
    read = scenario(tmp_path, text, flag_settings(values, flags=SCENARIO_FLAGS))
    assert (read.kv_cache.memory_bytes, read.kv_cache.blocks, read.kv_cache.block_size) == (2**30, None, 32)
    assert isinstance(read.latency, RooflineLatency)


def test_flags_alone_are_a_scenario(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trace(tmp_path, (0, 5, 5), (1, 5, 5))
    values = {"trace": "trace.csv", "model": "llama-3.1-8b", "device": "h100", "tp": "2"}
    prepared = prepare(load_scenario(flags=flag_settings(values, flags=SCENARIO_FLAGS)))
    assert len(prepared.requests) == 2
    assert prepared.facts["workload"] == "trace trace.csv, 2 requests, seed 0"


def test_paths_of_flags_start_where_the_command_runs(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    trace(tmp_path / "here", (0, 5, 5))
    flags = flag_settings({"trace": "trace.csv"}, flags=SCENARIO_FLAGS)
    assert scenario(tmp_path, LLAMA + WORK, flags).workload.trace == Path("trace.csv")
    with pytest.raises(ConfigError, match="there is no file"):
        scenario(tmp_path, f"{LLAMA}workload: {{trace: trace.csv}}")


def test_every_scenario_flag_sets_an_existing_key():
    keys = {path for path, _ in scenario_section().walk()}
    for flag in SCENARIO_FLAGS:
        assert flag.key in keys or flag.key.startswith("latency.roofline."), flag.name


def test_memory_left_beside_the_weights_is_the_pool(tmp_path):
    engine = prepare(scenario(tmp_path, LLAMA + WORK)).engine
    tokens = kv_tokens(model_spec("llama-3.1-8b"), device_spec("a100-80"))
    assert tokens - 16 < capacity(engine.layout, "default") <= tokens
    assert engine.host is not None
    assert engine.host.merged_blocks == 4 * engine.layout.merged_blocks


def test_services_share_the_memory_beside_the_weights_of_all_models(tmp_path):
    services = "services: [llama-3.1-8b, {name: b, model: llama-3.1-8b}, {name: c, model: qwen2.5-7b}]\n"
    read = scenario(tmp_path, f"latency: {{roofline: {{device: a100-80}}}}\n{services}{WORK}")
    layout = prepare(read).engine.layout
    device, models = device_spec("a100-80"), (model_spec("llama-3.1-8b"), model_spec("qwen2.5-7b"))
    room = int(0.9 * device.memory_bytes) - sum(model.weight_bytes() for model in models)
    assert room - layout.merged_bytes < layout.total_bytes <= room


def test_services_on_one_model_and_dtype_share_its_weights(tmp_path):
    services = (
        "services: [llama-3.1-8b, {name: b, model: llama-3.1-8b}, {name: c, model: qwen2.5-7b},"
        " {name: d, model: llama-3.1-8b, dtype: float32}, {name: e, model: llama-3.1-8b-tuned},"
        " {name: f, model: llama-3.1-8b-tuned}]\n"
    )
    pool = "kv_cache: {memory: 8GiB}\n"
    read = scenario(tmp_path, f"latency: {{roofline: {{device: a100-80}}}}\n{services}{WORK}{pool}")
    specs = prepare(read).engine.services
    weights = [specs[name].weights for name in ("llama-3.1-8b", *"bcdef")]
    assert weights == ["llama-3.1-8b", "llama-3.1-8b", *"cdee"]
    profile(tmp_path, "a", "b")
    unknown = f"services: [{{name: a}}, {{name: b}}]\n{FITTED}{WORK}kv_cache: {{tokens: 1600}}\n"
    assert [spec.weights for spec in prepare(scenario(tmp_path, unknown)).engine.services.values()] == [
        None
    ] * 2


@pytest.mark.parametrize(
    ("size", "tokens"), [("blocks: 30", 480), ("tokens: 500", 496), ("memory: 60MiB", 480)]
)
@pytest.mark.parametrize("layout", ["merged", "split"])
def test_a_pool_has_the_size_that_was_written(tmp_path, size, tokens, layout):
    read = scenario(tmp_path, f"{LLAMA}{WORK}kv_cache: {{{size}, layout: {layout}}}\n")
    prepared = prepare(read)
    assert capacity(prepared.engine.layout, "default") == tokens
    assert prepared.engine.layout.kind == layout


@pytest.mark.parametrize(
    ("dtype", "bytes_each"), [("float32", 4), ("bfloat16", 2), ("float8", 1), ("auto", 2)]
)
def test_a_dtype_changes_how_many_tokens_fit(tmp_path, dtype, bytes_each):
    services = f"services: [{{name: chat, model: llama-3.1-8b, dtype: {dtype}}}]\n"
    read = scenario(
        tmp_path, f"latency: {{roofline: {{device: h100}}}}\n{services}{WORK}kv_cache: {{memory: 1GiB}}\n"
    )
    per_token = 2 * 32 * 8 * 128 * bytes_each
    assert capacity(prepare(read).engine.layout, "chat") == 2**30 // (16 * per_token) * 16


def test_int8_kv_nearly_doubles_the_tokens_and_is_read_faster(tmp_path):
    services = "services: [{name: chat, model: llama-3.1-8b}]\n"
    pool = "kv_cache: {memory: 1GiB, dtype: DTYPE}\n"
    text = f"latency: {{roofline: {{device: h100}}}}\n{services}{WORK}{pool}"
    auto, int8 = (prepare(scenario(tmp_path, text.replace("DTYPE", dtype))) for dtype in ("auto", "int8"))
    per_token = 2 * 32 * 8 * (128 + 2 * 2)
    assert capacity(int8.engine.layout, "chat") == pytest.approx(2**30 / per_token, rel=0.02)
    assert capacity(int8.engine.layout, "chat") > 1.9 * capacity(auto.engine.layout, "chat")
    decodes = StepRows(64, 64 * 2000, (), 64)
    times = [run.engine.services["chat"].times.step_time(decodes) for run in (auto, int8)]
    assert times[1] < times[0]
    assert ["int8" in run.facts["KV pool"] for run in (auto, int8)] == [False, True]


def test_tp_splits_the_kv(tmp_path):
    one, two = (
        prepare(
            scenario(
                tmp_path,
                f"latency: {{roofline: {{model: llama-3.1-8b, device: h100, tp: {tp}}}}}\n{WORK}"
                "kv_cache: {memory: 1GiB}\n",
            )
        ).engine.layout
        for tp in (1, 2)
    )
    assert capacity(two, "default") == 2 * capacity(one, "default")


def test_a_pool_of_tokens_needs_no_model_but_swaps_nothing(tmp_path):
    profile(tmp_path, "anything")
    prepared = prepare(scenario(tmp_path, f"{FITTED}{WORK}kv_cache: {{tokens: 1600}}\n"))
    assert capacity(prepared.engine.layout, "default") == 1600
    assert prepared.engine.host is None
    assert "computed again" in prepared.facts["swap"]


def test_a_preset_has_a_layout(tmp_path):
    layouts = [
        prepare(scenario(tmp_path, f"{LLAMA}{WORK}{rest}")).engine.layout.kind
        for rest in (
            "scheduler: {preset: muxserve}\n",
            "scheduler: {preset: muxserve}\nkv_cache: {layout: merged}\n",
            "scheduler: {preset: vllm}\n",
        )
    ]
    assert layouts == ["split", "merged", "merged"]


def test_fitted_times_are_those_of_the_services_name_or_the_only_ones(tmp_path):
    profile(tmp_path, "a", "b")
    pool = "kv_cache: {tokens: 1600}\n"
    read = scenario(tmp_path, f"{FITTED}{WORK}{pool}services: [{{name: b}}, {{name: a}}]\n")
    services = prepare(read).engine.services
    assert services["b"].times == FittedTimes(replace(COSTS, constant_s=0.02))
    assert services["a"].times == FittedTimes(COSTS)
    with pytest.raises(ConfigError, match=r"profile of default .* there is: a .*latency\.service"):
        prepare(scenario(tmp_path, f"{FITTED}{WORK}{pool}"))
    chosen = prepare(scenario(tmp_path, f"latency: {{fit: latency.json, service: a}}\n{WORK}{pool}"))
    assert chosen.engine.services["default"].times == FittedTimes(COSTS)


def test_execution_time_is_that_of_the_mean_request_alone(tmp_path):
    prepared = prepare(scenario(tmp_path, LLAMA + WORK + "scheduler: {max_batched_tokens: 33}\n"))
    times = RooflineTimes(model_spec("llama-3.1-8b"), device_spec("a100-80"))
    chunks = [((33, 0),), ((33, 33),), ((33, 66),)]
    expected = sum(times.step_time(StepRows(0, 0, rows, 0)) for rows in chunks)
    expected += times.step_time(StepRows(1, 100, (), 1))
    expected += sum(times.step_time(StepRows(1, 100 + n, (), 1)) for n in range(1, 20))
    assert prepared.engine.services["default"].execution_s == pytest.approx(expected)
    assert "100 + 20 tokens" in prepared.facts["default alone"]


def test_a_simulated_request_alone_takes_the_execution_time(tmp_path):
    """The computed time equals the simulated one."""
    work = "workload: {lengths: {prompt: 100, output: 20}, rate: 0.001, requests: 1}\n"
    prepared = prepare(scenario(tmp_path, LLAMA + work + "scheduler: {max_batched_tokens: 40}\n"))
    [row] = prepared.run().requests
    assert row.e2e_s == pytest.approx(prepared.engine.services["default"].execution_s, abs=1e-7)


def test_a_written_execution_time_is_kept(tmp_path):
    services = "services: [{name: chat, execution: 3s, slo: {e2e_scale: 2}}]\n"
    prepared = prepare(scenario(tmp_path, LLAMA + WORK + services))
    assert prepared.engine.services["chat"].execution_s == 3
    assert {row.slo.e2e_s for row in prepared.run().requests} == {6}


def test_max_tokens_limit_the_execution_time(tmp_path):
    work = "workload: {lengths: {prompt: 100, output: 20}, rate: 1, requests: 3, max_tokens: 5}\n"
    prepared = prepare(scenario(tmp_path, LLAMA + work))
    assert "100 + 5 tokens" in prepared.facts["default alone"]
    assert {row.output_tokens for row in prepared.run().requests} == {5}


def table(folder: Path, *rows: tuple[float, int, int], more: str = "", **work: object) -> str:
    """A scenario of a trace, in a pool of 1600 tokens."""
    trace(folder, *rows)
    keys = "".join(f", {name}: {value}" for name, value in work.items())
    return f"{LLAMA}kv_cache: {{tokens: 1600}}\nworkload: {{trace: trace.csv{keys}}}\n{more}"


def test_the_pool_limits_outputs_in_the_execution_time(tmp_path):
    text = table(tmp_path, (0, 100, 50), (1, 100, 10**9))
    prepared = prepare(scenario(tmp_path, text))
    assert "100 + 775 tokens" in prepared.facts["default alone"]  # (50 + 1500) / 2
    assert [row.output_tokens for row in prepared.run().requests] == [50, 1500]


def test_the_context_limits_outputs_in_the_execution_time(tmp_path):
    text = table(tmp_path, (0, 100, 50), (1, 100, 10**9), more="services: [{name: chat, context: 250}]\n")
    assert "100 + 100 tokens" in prepare(scenario(tmp_path, text)).facts["chat alone"]  # (50 + 150) / 2


def test_rejected_requests_do_not_count_in_the_execution_time(tmp_path):
    rows = [(0, 100, 50), (1, 1600, 9), (2, 10**9, 9), (3, 1599, 9)]
    prepared = prepare(scenario(tmp_path, table(tmp_path, *rows)))
    assert "850 + 26 tokens" in prepared.facts["default alone"]  # (100 + 1599) / 2, (50 + 1) / 2
    assert [row.finish for row in sorted(prepared.run().requests, key=lambda row: row.arrival_ns)] == [
        "stop",
        "refused",
        "refused",
        "length",
    ]
    asked = prepare(scenario(tmp_path, table(tmp_path, (0, 1500, 50), (0, 1501, 50), max_tokens=100)))
    assert "1,500 + 50 tokens" in asked.facts["default alone"]


def test_scaled_slos_have_an_execution_time_if_every_request_is_rejected(tmp_path):
    more = "services: [{name: chat, slo: {e2e_scale: 5}}]\n"
    prepared = prepare(scenario(tmp_path, table(tmp_path, (0, 5000, 5), more=more)))
    assert "1,599 + 1 tokens" in prepared.facts["chat alone"]
    [row] = prepared.run().requests
    assert row.finish == "refused"


def test_the_execution_time_of_a_long_output_is_summed_in_parts(monkeypatch):
    times = RooflineTimes(model_spec("llama-3.1-8b"), device_spec("a100-80"))
    whole = time_alone(times, 100, 5000, 512)
    assert whole == pytest.approx(
        times.step_time(StepRows(0, 0, ((100, 0),), 1)) + times.decode_times(1, 101, 4999).sum()
    )
    asked: list[int] = []

    class Watched:
        step_time = staticmethod(times.step_time)

        def decode_times(self, sequences, context, steps):
            asked.append(steps)
            return times.decode_times(sequences, context, steps)

    monkeypatch.setattr("shoal.config.scenario_run._STEPS_AT_ONCE", 1000)
    assert time_alone(Watched(), 100, 5000, 512) == pytest.approx(whole)
    assert asked == [1000] * 4 + [999]


def test_requests_skipped_by_a_trace_are_a_fact(tmp_path):
    prepared = prepare(scenario(tmp_path, table(tmp_path, (0, 10, 5), (1, 10, 0), (2, 0, 5))))
    assert prepared.facts["trace"].startswith("2 requests skipped")
    assert "trace" not in prepare(scenario(tmp_path, table(tmp_path, (0, 10, 5)))).facts


@pytest.mark.parametrize(
    ("preset", "said"), [("orca", True), ("lightllm-conservative", True), ("vllm", False), ("shoal", False)]
)
def test_admissions_that_read_limits_without_limits_are_a_fact(tmp_path, preset, said):
    work = "scheduler: {preset: %s}\nworkload: {lengths: {prompt: 10, output: 5}, rate: 1, requests: 6%s}\n"
    assert ("output limit" in prepare(scenario(tmp_path, LLAMA + work % (preset, ""))).facts) == said
    limited = prepare(scenario(tmp_path, LLAMA + work % (preset, ", max_tokens: 100")))
    assert "output limit" not in limited.facts


def test_clients_wait_for_their_outputs(tmp_path):
    work = "workload: {lengths: {prompt: 10, output: 5}, clients: 2, requests: 6}\n"
    prepared = prepare(scenario(tmp_path, LLAMA + work))
    rows = sorted(prepared.run().requests, key=lambda row: row.arrival_ns)
    ends = sorted(row.finish_ns for row in rows)
    assert [row.arrival_ns for row in rows] == [0, 0, *ends[:4]]
    assert "2 clients" in prepared.facts["workload"]


def test_engines_and_dispatch(tmp_path):
    work = "workload: {lengths: {prompt: 10, output: 5}, arrivals: at-once, requests: 6}\n"
    run = prepare(scenario(tmp_path, LLAMA + work + "engines: 3\n")).run()
    assert len(run.engines) == 3
    assert sorted(row.engine for row in run.requests) == [0, 0, 1, 1, 2, 2]


def test_lengths_by_name(tmp_path):
    read = scenario(tmp_path, LLAMA + "workload: {lengths: azure-code, rate: 1, requests: 4}\n")
    assert read.workload.lengths is LENGTHS["azure-code"]


@pytest.mark.parametrize(
    ("text", "subject"),
    [
        (LLAMA + WORK, "llama-3.1-8b on 1 a100-80, 2 requests/s"),
        ("engines: 4\n" + LLAMA + WORK, "llama-3.1-8b on 4 a100-80, 2 requests/s"),
        (LLAMA.replace("80}", "80, tp: 2}") + WORK, "llama-3.1-8b on 2 a100-80, 2 requests/s"),
        (LLAMA + WORK.replace("rate: 2", "clients: 16"), "llama-3.1-8b on 1 a100-80, 16 clients"),
        (
            LLAMA + WORK.replace("rate: 2", "arrivals: at-once"),
            "llama-3.1-8b on 1 a100-80, 10 requests at once",
        ),
        (
            "latency: {roofline: {device: h100}}\n"
            "services: [{name: a, model: qwen2.5-7b}, llama-3.1-8b, {name: c, model: llama-3.1-8b}]\n" + WORK,
            "llama-3.1-8b, qwen2.5-7b on 1 h100, 2 requests/s",
        ),
    ],
)
def test_the_subject_says_models_devices_and_load(tmp_path, text, subject):
    prepared = prepare(scenario(tmp_path, text))
    assert prepared.subject == subject
    assert prepared.run().subject == subject


def test_the_load_of_a_trace_is_the_rate_at_which_it_comes(tmp_path):
    (tmp_path / "trace.csv").write_text(
        "prompt_tokens,output_tokens,arrival_s\n" + "".join(f"10,5,{n / 4}\n" for n in range(9))
    )
    prepared = prepare(scenario(tmp_path, LLAMA + "workload: {trace: trace.csv}\n"))
    assert prepared.subject == "llama-3.1-8b on 1 a100-80, 4 requests/s"
