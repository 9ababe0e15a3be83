import pytest
from config_builders import HttpOptions, from_flags, from_yaml

from shoal.config import load_config
from shoal.config.devices import EngineDevice
from shoal.core import SLO, ConfigError, SamplingDefaults, Service
from shoal.engine.options import EngineOptions
from shoal.kvcache import KVCacheOptions
from shoal.schedule import ADMISSIONS, FcfsStrict, SchedulerOptions

PLAN = """\
devices: [cpu]                    # or cuda:0
kv_cache: {memory: 2GiB, block_size: 16, layout: merged, prefix_caching: false, swap: 512MiB}
scheduler:
  order: fcfs-strict
  admission: {policy: past-future, reserved: 7%}
  victim: fewest-tokens
  preemption_mode: swap
  preempt_for_waiting: less-urgent
  lengths: learned
  starvation: 2500ms
  on_hopeless: refuse
  max_running: 64
  max_batched_tokens: 512
  depth: 2
services:
  - {name: chat,     model: smollm2,     slo: {ttft: 2s, tpot: 200ms}}
  - name: complete
    model: gemma3-270m
    dtype: float32
    max_model_len: 2048
    chat_template: "{{ messages[0].content }}"
    slo: {e2e: 1.5m, e2e_scale: 5}
    execution: 1200ms
    quota: 3
    starvation: 2s
    sampling: {temperature: 0.7, top_p: 90%, top_k: 40, min_p: 0.05, repetition_penalty: 1.1}
server: {host: 0.0.0.0, port: 9000, max_queue: 7, drain: 500ms}
"""


def error_of(tmp_path, text, **flags):
    with pytest.raises(ConfigError) as error:
        from_yaml(tmp_path, text, **flags)
    message = str(error.value)
    assert "\n" not in message
    return message.replace(f"{tmp_path}/", "")


def test_the_plan_loads(tmp_path):
    config = from_yaml(tmp_path, PLAN)
    assert config.devices == (EngineDevice(device="cpu", name="0"),)
    assert config.kv_cache == KVCacheOptions(
        memory_bytes=2 * 2**30,
        block_size=16,
        layout="merged",
        prefix_caching=False,
        swap_bytes=512 * 2**20,
    )
    assert config.scheduler == SchedulerOptions(
        order=FcfsStrict(),
        admission=ADMISSIONS["past-future"](reserved=0.07),
        victim="fewest-tokens",
        preemption_mode="swap",
        preempt_for_waiting="less-urgent",
        lengths="learned",
        starvation_s=2.5,
        on_hopeless="refuse",
        max_running=64,
        max_batched_tokens=512,
        depth=2,
    )
    assert config.services == (
        Service(name="chat", model="smollm2", slo=SLO(ttft_s=2, tpot_s=0.2)),
        Service(
            name="complete",
            model="gemma3-270m",
            dtype="float32",
            max_model_len=2048,
            chat_template="{{ messages[0].content }}",
            slo=SLO(e2e_s=90, e2e_scale=5),
            execution_s=1.2,
            quota=3,
            starvation_s=2,
            sampling=SamplingDefaults(
                temperature=0.7, top_p=0.9, top_k=40, min_p=0.05, repetition_penalty=1.1
            ),
        ),
    )
    assert config.server == HttpOptions(host="0.0.0.0", port=9000, drain_s=0.5)
    assert config.max_queue == 7
    assert config.engine_options() == EngineOptions(
        services=config.services,
        device="cpu",
        kv_cache=config.kv_cache,
        scheduler=config.scheduler,
        max_queue=7,
    )


def test_missing_keys_have_the_defaults_of_their_options(tmp_path):
    config = from_yaml(tmp_path, "services: [smollm2]")
    assert config.services == (Service(name="smollm2", model="smollm2"),)
    assert config.engine_options() == EngineOptions(services=config.services)
    assert config.server == HttpOptions()


@pytest.mark.parametrize("empty", ["kv_cache:", "kv_cache: null", "kv_cache: {}"])
def test_an_empty_section_is_all_defaults(tmp_path, empty):
    assert from_yaml(tmp_path, f"services: [smollm2]\n{empty}").kv_cache == KVCacheOptions()


@pytest.mark.parametrize("name", ["conservative", "aggressive", "past-future"])
def test_an_admission_may_be_a_bare_name(tmp_path, name):
    config = from_yaml(tmp_path, f"services: [smollm2]\nscheduler: {{admission: {name}}}")
    assert config.scheduler.admission == ADMISSIONS[name]()


def test_a_name_that_looks_like_another_type_stays_a_name(tmp_path):
    config = from_yaml(tmp_path, "services: [{name: no, model: smollm2}, {name: 70, model: gemma3-270m}]")
    assert [service.name for service in config.services] == ["no", "70"]


def test_a_chat_template_may_be_a_file_beside_the_configuration(tmp_path):
    (tmp_path / "plain.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    config = from_yaml(tmp_path, "services: [{model: gemma3-270m, chat_template: plain.jinja}]")
    assert config.services[0].chat_template == "{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("smollm2", "smollm2"),
        ("org/Model-1B", "org/Model-1B"),
        ("/models/tiny", "tiny"),
        ("./a b.gguf", "a-b"),
    ],
)
def test_a_service_is_named_after_its_model(tmp_path, model, name):
    assert from_yaml(tmp_path, f"services: [{{model: {model}}}]").services[0].name == name


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "scheduler: {admision: aggressive}",
            "shoal.yaml, line 2: scheduler.admision: unknown key, did you mean 'admission'?",
        ),
        (
            "scheduler: {on_hopeless: reject}",
            "shoal.yaml, line 2: scheduler.on_hopeless: expected one of serve, last, refuse, got 'reject'",
        ),
        ("schedular: {}", "shoal.yaml, line 2: schedular: unknown key, did you mean 'scheduler'?"),
        ("max_queue: 3", "shoal.yaml, line 2: max_queue: unknown key"),
        (
            "kv_cache: {memory: lots}",
            "shoal.yaml, line 2: kv_cache.memory: expected a size such as 512MB, 2GiB "
            "or a number of bytes, got 'lots'",
        ),
        ("kv_cache: {memory: 0}", "kv_cache.memory: must be at least 1, got 0"),
        ("kv_cache: {memory: [1]}", "kv_cache.memory: expected a size such as 2GiB, got a list"),
        ("kv_cache: {block_size: 1.5}", "kv_cache.block_size: expected a whole number, got '1.5'"),
        ("kv_cache: {block_size: 0}", "kv_cache.block_size: must be at least 1, got 0"),
        ("kv_cache: {block_size: null}", "kv_cache.block_size: expected a whole number, got nothing"),
        (
            "kv_cache: {layout: merge}",
            "kv_cache.layout: expected one of merged, split, got 'merge', did you mean 'merged'?",
        ),
        (
            "kv_cache: {prefix_caching: maybe}",
            "kv_cache.prefix_caching: expected true or false, got 'maybe'",
        ),
        ("kv_cache: 2GiB", "shoal.yaml, line 2: kv_cache: expected keys and values, got '2GiB'"),
        (
            "scheduler: {order: lifo}",
            "scheduler.order: expected one of fcfs, fcfs-strict, round-robin, mlfq, ",
        ),
        ("scheduler: {order: mlqf}", "got 'mlqf', did you mean 'mlfq'?"),
        ("scheduler: {order: {levels: 3}}", "scheduler.order: the key 'policy' must be one of fcfs, "),
        (
            "scheduler: {order: {policy: mlfq, level: 3}}",
            "shoal.yaml, line 2: scheduler.order.level: unknown key, did you mean 'levels'?",
        ),
        (
            "scheduler: {order: {policy: mlfq, levels: 0}}",
            "shoal.yaml, line 2: scheduler.order: order mlfq: levels must be at least 1, got 0",
        ),
        ("scheduler: {order: doubling-budget:variant=triple}", "variant must be one of join, literal, batch"),
        ("scheduler: {victim: oldest}", "scheduler.victim: expected one of newest, "),
        (
            "scheduler: {preemption_mode: forget}",
            "scheduler.preemption_mode: expected one of recompute, swap, got",
        ),
        (
            "scheduler: {eviction: swap}",
            "shoal.yaml, line 2: scheduler.eviction: is now called scheduler.preemption_mode",
        ),
        (
            "scheduler: {preempt: true}",
            "shoal.yaml, line 2: scheduler.preempt: is now called scheduler.preempt_for_waiting",
        ),
        ("scheduler: {lengths: oracle}", "scheduler.lengths: expected one of "),
        (
            "scheduler: {starvation: 0}",
            "shoal.yaml, line 2: scheduler: scheduler starvation must be above 0 seconds, got 0",
        ),
        ("kv_cache: {swap: some}", "kv_cache.swap: expected a size such as 512MB"),
        ("scheduler: {depth: 3}", "scheduler.depth: must be at most 2, got 3"),
        ("scheduler: {admission: optimistic}", "scheduler.admission: expected one of "),
        ("scheduler: {admission: {reserved: 5%}}", "scheduler.admission: the key 'policy' must be one of "),
        ("scheduler: {admission: [aggressive]}", "scheduler.admission: expected one of "),
        ("scheduler: {admission: oracle}", "scheduler.admission: expected one of "),
        (
            "scheduler: {admission: {policy: past-future, reservd: 5%}}",
            "scheduler.admission.reservd: unknown key, did you mean 'reserved'?",
        ),
        (
            "scheduler: {admission: {policy: past-future, reserved: 150%}}",
            "shoal.yaml, line 2: scheduler.admission: admission reserved must be in [0, 1), got 1.5",
        ),
        (
            "scheduler: {preset: seallm-joined}",
            "shoal.yaml, line 2: scheduler.preset: expected one of shoal, vllm, orca, ",
        ),
        ("scheduler: {preset: seallm-joined}", "got 'seallm-joined', did you mean 'seallm-join'?"),
        ("server: {port: 70000}", "server.port: must be at most 65535, got 70000"),
        ("server: {drain: soon}", "server.drain: expected a time such as 200ms"),
        ("devices: [tpu]", "devices[0]: expected cpu, cuda:0 or simulated, got 'tpu'"),
        ("threads: 0", "threads: must be at least 1, got 0"),
        ("threads: 1\nthreads: 2", "shoal.yaml, line 3: threads: written twice, first at "),
        ("[a]: 1", "not valid YAML"),
        ("? [a]\n: 1", "shoal.yaml, line 2: expected a plain word as key"),
        ("threads: [1", "shoal.yaml, line 3: not valid YAML"),
        ("threads: &loop [*loop]", "this alias contains itself"),
    ],
)
def test_mistakes_are_told_with_their_place(tmp_path, text, expected):
    message = error_of(tmp_path, f"services: [smollm2]\n{text}\n")
    assert expected in message or (text == "[a]: 1" and "plain word" in message)


@pytest.mark.parametrize(
    ("services", "expected"),
    [
        ("[]", "services: name at least one model"),
        ("[{name: chat}]", "services[0].model: missing; write text"),
        ("[{model: ''}]", "services[0].model: expected text, got an empty string"),
        ("[{model: a, slo: {ttft: 2s, e2e_scal: 5}}]", "services[0].slo.e2e_scal: unknown key, did you mean"),
        ("[{model: a, dtype: int3}]", "services[0].dtype: expected one of auto, float32, bfloat16, float16"),
        ("[{model: a, max_model_len: 0}]", "services[0].max_model_len: must be at least 1, got 0"),
        ("[{model: a, chat_template: no.jinja}]", "cannot read the template file"),
        ("[{model: a, name: 'two words'}]", "services[0].name: use no spaces"),
        (
            "[c=a]",
            "services[0]: a name before a model is written --service c=a, or in a file {name: c, model: a}",
        ),
        ("[./c=a]", "services[0].name: use no spaces, '='"),
        ("[a, a]", "services[1].name: there is already a service named 'a'"),
        ("[{model: a}, {name: a, model: b}]", "services[1].name: there is already a service named 'a'"),
    ],
)
def test_mistakes_in_services(tmp_path, services, expected):
    assert expected in error_of(tmp_path, f"services: {services}")


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (
            "temperature: hot",
            "temperature: expected a number such as 0.05 or a percentage such as 5%, got 'hot'",
        ),
        ("temperature: 101", "temperature: must be at most 100, got 101"),
        ("top_p: 0", "top_p: must be more than 0, got 0"),
        ("top_k: 2.5", "top_k: expected a whole number, got '2.5'"),
        ("top_k: 3000000000", "top_k: must be at most 2147483647, got 3000000000"),
        ("min_p: 2", "min_p: must be at most 1, got 2"),
        ("repetition_penalty: 0", "repetition_penalty: must be at least 0.01, got 0"),
        ("temprature: 0", "temprature: unknown key, did you mean 'temperature'?"),
    ],
)
def test_errors_in_sampling_have_their_line(tmp_path, written, expected):
    text = f"services:\n  - model: a\n    sampling:\n      {written}\n"
    assert error_of(tmp_path, text) == f"shoal.yaml, line 4: services[0].sampling.{expected}"


def test_no_services_at_all(tmp_path):
    assert "shoal serve smollm2" in error_of(tmp_path, "devices: [cpu]")


def test_the_error_of_a_key_in_the_wrong_section_names_the_right_one(tmp_path):
    assert "(there is 'server.max_queue')" in error_of(tmp_path, "services: [a]\nmax_queue: 3")


@pytest.mark.parametrize("text", ["- a\n- b", "just words"])
def test_a_file_must_hold_keys(tmp_path, text):
    assert "expected keys and values at the top" in error_of(tmp_path, text)


def test_a_file_that_cannot_be_read(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot read .*none\.yaml: No such file"):
        load_config(HttpOptions, file=tmp_path / "none.yaml")
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\x00\x80")
    with pytest.raises(ConfigError, match="not UTF-8"):
        load_config(HttpOptions, file=binary)


def test_a_yaml_alias_may_be_used_twice(tmp_path):
    text = "services: [{name: a, model: m, slo: &goal {ttft: 1s}}, {name: b, model: m, slo: *goal}]"
    first, second = from_yaml(tmp_path, text).services
    assert first.slo == second.slo == SLO(ttft_s=1)


def test_flags_alone_need_no_file():
    assert from_flags("smollm2").services == (Service(name="smollm2", model="smollm2"),)


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ("slo: {ttft: 0}", "line 2: services[0].slo.ttft: must be more than 0s, got 0"),
        ("slo: {tpot: 0ms}", "line 2: services[0].slo.tpot: must be more than 0s, got 0ms"),
        ("slo: {mtpot: 0s}", "line 2: services[0].slo.mtpot: must be more than 0s, got 0s"),
        ("slo: {e2e: -1s}", "line 2: services[0].slo.e2e: expected a time such as 200ms"),
        (
            "pace: true",
            "line 2: services[0].pace: needs the time between two tokens of a stream: write slo.tpot, or"
            " leave pace out",
        ),
        ("slo: {e2e_scale: 0}", "line 2: services[0].slo.e2e_scale: must be more than 0, got 0"),
        ("slo: {e2e_scale: .inf}", "line 2: services[0].slo.e2e_scale: expected a number"),
        ("slo: {e2e_scale: 1e7}", "line 2: services[0].slo.e2e_scale: must be at most 1e+06, got 1e7"),
        ("slo: {scale: 5}", "line 2: services[0].slo.scale: unknown key"),
        (
            "dtype: auto\n    slo:\n      e2e_scale: 5",
            "line 4: services[0].slo.e2e_scale: is a multiple of the service's execution time, which is not "
            "known: measure it with `shoal profile` or write `execution: 1.2s`",
        ),
        ("execution: 0s", "line 2: services[0].execution: must be more than 0s, got 0s"),
        ("quota: 0", "line 2: services[0].quota: must be at least 1, got 0"),
        ("quota: 1.5", "line 2: services[0].quota: expected a whole number"),
        ("starvation: 0s", "line 2: services[0].starvation: must be more than 0s, got 0s, or never"),
    ],
)
def test_errors_of_invalid_slos_have_their_place(tmp_path, lines, expected):
    assert expected in error_of(tmp_path, f"services:\n  - {lines}\n    model: smollm2\n")


def test_an_slo_may_be_null(tmp_path):
    text = "services: [{model: smollm2, slo: {ttft: null, e2e_scale: null}, execution: null}]"
    assert from_yaml(tmp_path, text).services == (Service(name="smollm2", model="smollm2"),)


def test_slos_may_be_flags(tmp_path):
    config = from_flags(services=("chat=smollm2,slo.e2e_scale=5,slo.ttft=2s,execution=1.2s,quota=4",))
    slo = SLO(ttft_s=2, e2e_scale=5)
    assert config.services == (Service(name="chat", model="smollm2", slo=slo, execution_s=1.2, quota=4),)


def test_max_iterations_above_1_needs_depth_1(tmp_path):
    text = "services: [smollm2]\nscheduler: {max_iterations: 4}\n"
    assert from_yaml(tmp_path, text).scheduler.max_iterations == 4
    with pytest.raises(ConfigError, match="needs depth 1"):
        from_yaml(tmp_path, text.replace("4}", "4, depth: 2}"))


def test_co_batching_is_on_by_default_and_can_be_limited(tmp_path):
    text = "services: [smollm2]\nscheduler: {co_batch_rows: 16}\n"
    assert from_yaml(tmp_path, text).scheduler == SchedulerOptions(co_batch=True, co_batch_rows=16)
    assert from_yaml(tmp_path, text, co_batch=False).scheduler.co_batch is False
    assert from_flags("smollm2", co_batch_rows="3", preset="vllm").scheduler.co_batch_rows == 3
    with pytest.raises(ConfigError, match=r"scheduler\.co_batch_rows"):
        from_flags("smollm2", co_batch_rows="0")


def test_random_weights_and_their_seed_are_of_a_service(tmp_path):
    text = "services: [a, {model: b, weights: random}, {model: c, weights: random, weights_seed: 7}]"
    services = from_yaml(tmp_path, text).services
    assert [(s.weights, s.weights_seed) for s in services] == [("files", 0), ("random", 0), ("random", 7)]
    assert from_flags(services=("c=c,weights=random,weights_seed=7",)).services == (services[2],)


def test_errors_of_random_weights_have_their_place(tmp_path):
    text = "services:\n  - model: m\n    weights_seed: 3"
    assert error_of(tmp_path, text) == (
        "shoal.yaml, line 3: services[0].weights_seed: is of random weights only: write weights: random,"
        " or leave the seed out"
    )
    text = "services: [{model: m, weights: dummy}]"
    assert "services[0].weights: expected one of files, random, got 'dummy'" in error_of(tmp_path, text)
    text = "services: [{model: m, weights: random, weights_seed: -1}]"
    assert "services[0].weights_seed: must be at least 0" in error_of(tmp_path, text)
