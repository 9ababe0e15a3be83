import pytest
from config_builders import from_flags, from_yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hypothesis_profiles import examples
from shoal.config import CLUSTER_FLAGS, ENGINE_FLAGS, SERVER_FLAGS, config_section
from shoal.core import SLO, ConfigError, SamplingDefaults, Service
from shoal.schedule import ADMISSIONS, FcfsStrict
from shoal.serve.options import ServerOptions

# For each flag: what may be written, in a file or on the command line alike.
VALUES = {
    "device": ["cpu", "cuda:0"],
    "dispatch": ["least-requests", "round-robin"],
    "cluster-name": ["mine", "a-1.b_2"],
    "kv-memory": ["2GiB", "512MB", "4096", "1.5MiB"],
    "block-size": ["16", "1", "128"],
    "kv-cache-dtype": ["auto", "int8"],
    "layout": ["merged", "split"],
    "swap": ["4096", "1GiB"],
    "weights-memory": ["2GiB", "300MB"],
    "preset": ["shoal", "muxserve", "fastserve", "seallm-join"],
    "order": ["fcfs", "round-robin", "mlfq:levels=4,quantum=50ms", "doubling-budget:variant=c-mu"],
    "admission": ["conservative", "aggressive", "past-future", "past-future:reserved=5%,admit_every=10"],
    "victim": ["newest", "lowest-priority"],
    "preemption-mode": ["recompute", "swap"],
    "preempt-for-waiting": ["never", "gain", "less-urgent"],
    "max-token-gap": ["500ms", "never"],
    "lengths": ["maximum", "history", "learned"],
    "starvation": ["2s", "150ms"],
    "on-hopeless": ["serve", "last", "refuse"],
    "max-running": ["1", "300"],
    "max-batched-tokens": ["7", "4096"],
    "depth": ["1", "2"],
    "max-iterations": ["1"],
    "threads": ["1", "12"],
    "attention": ["auto", "reference"],
    "host": ["0.0.0.0", "::1"],
    "port": ["0", "9000"],
    "max-queue": ["1", "5000"],
    "step-timeout": ["30s", "1.5m"],
    "load-timeout": ["5s", "2h"],
    "drain": ["0", "1.5m", "200ms"],
}
FLAGS = (*ENGINE_FLAGS, *CLUSTER_FLAGS, *SERVER_FLAGS)
TESTED = [flag for flag in FLAGS if flag.name in VALUES]


@given(st.data())
@settings(max_examples=examples(60), suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_file_and_flags_give_the_same_configuration(tmp_path, data):
    flags = data.draw(st.lists(st.sampled_from(TESTED), unique=True))
    written = {flag: data.draw(st.sampled_from(VALUES[flag.name])) for flag in flags}
    text = "services: [smollm2]\n"
    sections: dict[str, list[str]] = {}
    for flag, value in written.items():
        section, _, key = flag.key.rpartition(".")
        sections.setdefault(section, []).append(f"{key or section}: '{value}'")
    for section, lines in sections.items():
        text += f"{section}: {{{', '.join(lines)}}}\n" if section else "\n".join(lines) + "\n"
    arguments = {flag.argument: value for flag, value in written.items()}
    assert from_yaml(tmp_path, text) == from_flags("smollm2", **arguments)
    assert from_yaml(tmp_path, "services: [smollm2]", **arguments) == from_flags("smollm2", **arguments)


def test_every_flag_sets_a_key_that_exists():
    keys = {path.partition("[]")[0] for path, _ in config_section(ServerOptions).walk()}
    assert {flag.key for flag in FLAGS} <= keys


def test_flags_override_single_keys_of_the_file(tmp_path):
    text = "services: [smollm2]\nkv_cache: {memory: 1GiB, block_size: 8}\nscheduler: {max_running: 3}"
    config = from_yaml(tmp_path, text, kv_memory="2MiB", order="fcfs-strict", prefix_caching=False)
    assert (config.kv_cache.memory_bytes, config.kv_cache.block_size) == (2 * 2**20, 8)
    assert (config.scheduler.order, config.scheduler.max_running) == (FcfsStrict(), 3)
    assert config.kv_cache.prefix_caching is False


def test_an_admission_flag_replaces_the_whole_policy(tmp_path):
    text = "services: [smollm2]\nscheduler: {admission: {policy: past-future, reserved: 9%}}"
    assert from_yaml(tmp_path, text, admission="aggressive").scheduler.admission == ADMISSIONS["aggressive"]()


def test_services_as_flags():
    config = from_flags(
        "gemma3-270m",
        services=(
            "chat=smollm2,dtype=float32,max_model_len=512,slo.ttft=2s,slo.tpot=200ms,slo.mtpot=1.5s",
            "smollm2,sampling.temperature=0",
        ),
    )
    assert config.services == (
        Service(name="gemma3-270m", model="gemma3-270m"),
        Service(
            name="chat",
            model="smollm2",
            dtype="float32",
            max_model_len=512,
            slo=SLO(ttft_s=2, tpot_s=0.2, mtpot_s=1.5),
        ),
        Service(name="smollm2", model="smollm2", sampling=SamplingDefaults(temperature=0)),
    )


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({"kv_memory": "much"}, "--kv-memory: kv_cache.memory: expected a size"),
        ({"admission": "past-future:reserved"}, "--admission: scheduler.admission: expected key=value"),
        (
            {"admission": "past-future:reserved=1%,reserved=2%"},
            "scheduler.admission: the key 'reserved' is written twice",
        ),
        ({"admission": "past-futur"}, "did you mean 'past-future'?"),
        ({"preset": "sealm"}, "--preset: scheduler.preset: expected one of shoal, vllm, orca, "),
        ({"preset": "sealm"}, "got 'sealm', did you mean 'seallm'?"),
        ({"order": "mlfq:level=2"}, "--order: scheduler.order.level: unknown key, did you mean 'levels'?"),
        ({"starvation": "often"}, "--starvation: scheduler.starvation: expected a time such as"),
        ({"starvation": "often"}, "got 'often', or never"),
        ({"admission": "aggressive:reserved=1%"}, "--admission: scheduler.admission.reserved: unknown key"),
        ({"services": ("chat=",)}, "--service: expected NAME=MODEL"),
        ({"services": ("=smollm2",)}, "--service: expected NAME=MODEL"),
        (
            {"services": ("a=b,dtipe=float32",)},
            "--service: services[0].dtipe: unknown key, did you mean 'dtype'",
        ),
        ({"services": ("a=b,slo=1s,slo.ttft=2s",)}, "--service: services: the key 'slo' is written twice"),
        ({"services": ("a=b,name=c",)}, "--service: services: the key 'name' is written twice"),
    ],
)
def test_mistakes_name_the_flag(flags, expected):
    with pytest.raises(ConfigError) as error:
        from_flags("smollm2", **flags) if "services" not in flags else from_flags(**flags)
    assert expected in str(error.value)
