"""A real engine around a tiny model with random weights."""

import os
import subprocess
import sys

import pytest
from engine_builders import make_request, run_all

from shoal.core import ConfigError, ModelUnavailable, Service
from shoal.engine.build import build_engine, default_swap_bytes, default_threads
from shoal.engine.options import EngineOptions
from shoal.kvcache import KVCacheOptions
from shoal.native import native_status
from shoal.schedule import SchedulerOptions

MEMORY = 1 << 16
GIB = 1 << 30


@pytest.fixture(scope="module")
def tiny_llama(tmp_path_factory):
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        eos_token_id=63,
    )
    folder = tmp_path_factory.mktemp("tiny")
    model = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    return folder, model


def options(**fields) -> EngineOptions:
    services = tuple(Service(name=name, model="tiny", dtype="float32") for name in "ab")
    defaults = {
        "services": services,
        "kv_cache": KVCacheOptions(memory_bytes=MEMORY, block_size=4),
        "threads": 1,
    }
    return EngineOptions(**(defaults | fields))


@pytest.mark.parametrize(("layout", "depth"), [("merged", 1), ("merged", 2), ("split", 1)])
def test_info_of_a_built_engine_matches_the_model(tiny_llama, layout, depth):
    import torch

    folder, model = tiny_llama
    told: list[str] = []
    engine, info = build_engine(
        options(
            kv_cache=KVCacheOptions(memory_bytes=MEMORY, block_size=4, layout=layout),
            scheduler=SchedulerOptions(depth=depth),
        ),
        {"a": folder, "b": folder},
        progress=told.append,
    )
    prompt = [3, 1, 4, 1, 5, 9, 2, 6]
    for service in "ab":
        engine.submit(make_request(service, prompt=prompt, service=service, ignore_eos=True))
    events = run_all(engine)
    expected = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=8, eos_token_id=None)
    for service in "ab":
        assert [t for e in events[service] for t in e.tokens] == expected[0, len(prompt) :].tolist()
    engine.close()
    assert told == [native_status(), "loading tiny (float32) on cpu"], (
        "two services with one model load it once"
    )
    assert info.kernels == native_status()
    limits = info.services["a"]
    assert (limits.context_tokens, limits.vocab_size, limits.eos_token_ids) == (128, 64, (63,))
    assert limits.max_total_tokens <= 128
    assert (limits.dtype, limits.weight_bytes) == ("float32", info.weight_bytes)
    assert MEMORY * 0.5 < info.kv_bytes <= MEMORY
    assert info.weight_bytes > 0
    assert (info.threads, info.device, info.block_size) == (1, "cpu", 4)


def test_a_pool_smaller_than_a_block_is_rejected(tiny_llama):
    folder, _ = tiny_llama
    small = options(kv_cache=KVCacheOptions(memory_bytes=100))
    with pytest.raises(ConfigError, match="memory"):
        build_engine(small, {"a": folder, "b": folder})


def test_int8_kv_leaves_room_for_more_tokens(tiny_llama):
    folder, _ = tiny_llama
    tokens, bytes_ = [], []
    for dtype in ("auto", "int8"):
        kv_cache = KVCacheOptions(memory_bytes=MEMORY, block_size=16, dtype=dtype)
        engine, info = build_engine(options(kv_cache=kv_cache), {"a": folder, "b": folder})
        engine.close()
        tokens.append(info.services["a"].kv_tokens)
        bytes_.append(info.kv_bytes)
    # 2 layers of 2 heads: keys and values of 4 float32 each, or 4 bytes and a scale of 2.
    assert tokens[0] * 2 * 2 * 2 * 4 * 4 <= bytes_[0] <= MEMORY
    assert tokens[1] * 2 * 2 * 2 * (4 + 2) <= bytes_[1] <= MEMORY
    assert tokens[1] > 2 * tokens[0]


@pytest.mark.parametrize(
    ("dtype", "device", "message"),
    [
        ("fp8", "cpu", "'fp8' is not known; possible are auto, int8"),
        ("int8", "cuda:0", "for CPUs only.*auto"),
    ],
)
def test_unsupported_kv_dtypes_are_rejected(dtype, device, message):
    with pytest.raises(ConfigError, match=message):
        options(kv_cache=KVCacheOptions(dtype=dtype), device=device)


@pytest.mark.parametrize("field", ["memory", "swap"])
def test_more_memory_than_is_free_is_rejected(tiny_llama, field):
    folder, _ = tiny_llama
    sizes = {"memory_bytes": MEMORY} | {f"{field}_bytes": 2**50}
    large = options(kv_cache=KVCacheOptions(**sizes), scheduler=SchedulerOptions(preemption_mode="swap"))
    with pytest.raises(ConfigError, match=rf"kv_cache\.{field}: 1048576\.0 GiB are asked for, but .* free"):
        build_engine(large, {"a": folder, "b": folder})


@pytest.mark.parametrize(
    ("device", "pool_gib", "free_gib", "expected_gib"),
    [("cpu", 2, 64, 8), ("cpu", 40, 64, 16), ("cuda:0", 40, 64, 4), ("cuda", 2, 8, 2), ("cuda", 0.5, 64, 2)],
)
def test_default_host_memory_for_swapped_kv(device, pool_gib, free_gib, expected_gib):
    assert default_swap_bytes(device, int(pool_gib * GIB), free_gib * GIB) == expected_gib * GIB


@pytest.mark.parametrize("free", [MEMORY, 100 * MEMORY])
def test_engines_on_one_device_share_the_default_pool_memory(tiny_llama, monkeypatch, free):
    from shoal.execute.model import model_set

    folder, _ = tiny_llama
    monkeypatch.setattr(model_set, "DEFAULT_CPU_KV_BYTES", MEMORY)
    monkeypatch.setattr(model_set, "free_bytes", lambda device: free)

    def pool_bytes(share):
        shared = options(kv_cache=KVCacheOptions(), memory_share=share)
        return build_engine(shared, {"a": folder, "b": folder})[1].kv_bytes

    alone, half = pool_bytes(1.0), pool_bytes(0.5)
    assert 0.8 * alone < 2 * half <= alone


def test_engines_on_one_device_share_the_default_swap_memory():
    assert default_swap_bytes("cpu", 40 * GIB, 64 * GIB, share=0.5) == 8 * GIB


def test_services_without_a_folder_are_named(tiny_llama):
    folder, _ = tiny_llama
    with pytest.raises(ModelUnavailable, match="b"):
        build_engine(options(), {"a": folder})


def test_the_engine_computes_on_every_core_it_may_use():
    assert default_threads() == len(os.sched_getaffinity(0))


def test_invalid_weights_are_rejected():
    service = Service(name="s", model="tiny", weights_seed=3)
    with pytest.raises(ConfigError, match=r"service s: weights_seed is of random weights only"):
        options(services=(service,))
    service = Service(name="s", model="tiny", weights="dummy")
    with pytest.raises(ConfigError, match=r"service s: weights must be one of files, random, got 'dummy'"):
        options(services=(service,))


@pytest.mark.parametrize("wrong", [{"threads": 0}, {"max_queue": 0}, {"memory_share": 0}])
def test_invalid_options_are_rejected(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        options(**wrong)


@pytest.mark.slow
def test_an_engine_process_imports_all_that_it_computes_with_before_it_has_its_configuration():
    program = (
        "import sys; import shoal.engine.process.torch_engine;"
        "wanted = {'torch', 'transformers', 'shoal.execute.torch_executor', 'shoal.execute.model.model_set'};"
        "sys.exit(str(wanted - sys.modules.keys()) if wanted - sys.modules.keys() else 0)"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
