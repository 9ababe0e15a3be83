"""Engines whose weights come and go: limits for the scheduler, and speeds that are measured once."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from at_hand import on_cpu
from image_caches import use_image_cache
from shoal.core import ConfigError, Service
from shoal.engine import build
from shoal.engine.build import build_engine
from shoal.engine.options import EngineOptions
from shoal.kvcache import KVCacheOptions
from shoal.schedule import SchedulerOptions, WeightsOptions

pytestmark = on_cpu
NAMES = ("a", "b")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    """Two models, and a cache for their images."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("weights")
    for layers, name in enumerate(NAMES, start=1):
        torch.manual_seed(layers)
        config = LlamaConfig(
            vocab_size=64,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=layers,
            num_attention_heads=4,
            max_position_embeddings=128,
        )
        LlamaForCausalLM(config).save_pretrained(folder / name)
    with pytest.MonkeyPatch.context() as patch:
        use_image_cache(folder / "cache", patch)
        yield {name: folder / name for name in NAMES}


def options(memory_bytes: int | None = 1 << 20, *, pin: str = "", **fields: object) -> EngineOptions:
    services = tuple(Service(name=name, model="m", dtype="float32", pin=name == pin) for name in NAMES)
    kv_cache = KVCacheOptions(memory_bytes=1 << 16, block_size=4)
    weights = WeightsOptions(memory_bytes=memory_bytes)
    return EngineOptions(
        **{"services": services, "kv_cache": kv_cache, "threads": 1, "weights": weights} | fields
    )


def test_limits_name_the_weights_and_their_size(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = []
    scheduler = build.Scheduler

    def record(pool, given, *arguments, **keywords):
        limits.append(given)
        return scheduler(pool, given, *arguments, **keywords)

    monkeypatch.setattr(build, "Scheduler", record)
    _, info = build_engine(options(pin="b"), folders)
    [found] = limits
    assert [found[name].pinned for name in NAMES] == [False, True]
    assert found["a"].weights != found["b"].weights
    assert found["a"].weight_bytes < found["b"].weight_bytes
    assert info.weight_bytes == sum(limit.weight_bytes for limit in found.values())
    assert {name: info.services[name].weight_bytes for name in NAMES} == {
        name: found[name].weight_bytes for name in NAMES
    }


def test_the_memory_holds_what_is_pinned_and_any_other_weights(folders: dict[str, Path]) -> None:
    engine, info = build_engine(options(), folders)
    engine.close()
    small, large = (info.services[name].weight_bytes for name in NAMES)
    pinned = r"of 'a' \(.* MiB, pinned\), 'b' \(.* MiB\), which must be in memory at once"
    for pin, needed, message in [("", large, r"of 'b' \(.* MiB\), which"), ("a", small + large, pinned)]:
        with pytest.raises(ConfigError, match=rf"weights\.memory: .* are less than .* {message}"):
            build_engine(options(needed - 1, pin=pin), folders)
        engine, _ = build_engine(options(needed, pin=pin), folders)
        engine.close()
    engine, _ = build_engine(options(small + large - 1), folders)
    with pytest.raises(ConfigError, match=pinned):
        engine.pin_service("a", True).result()
    engine.close()


@pytest.mark.parametrize("depth", [1, 2])
def test_speeds_are_measured_at_the_first_start_only(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, depth: int
) -> None:
    use_image_cache(tmp_path / "cache", monkeypatch)
    given = options(scheduler=SchedulerOptions(depth=depth))
    measured = []
    measure = build.measure_absent
    monkeypatch.setattr(build, "measure_absent", lambda *args: measured.append(args[2]) or measure(*args))
    starts = [build_engine(given, folders)[1].services for _ in range(2)]
    assert measured == list(NAMES)
    assert starts[0] == starts[1]
    assert all(service.decode_s > 0 and service.prefill_s > 0 for service in starts[0].values())
    build_engine(options(threads=2), folders)
    assert measured == list(NAMES) * 2
    for file in (tmp_path / "cache").glob("images/*/speeds.json"):
        file.write_text("{")
    build_engine(given, folders)
    assert measured == list(NAMES) * 3


def test_weights_are_absent_after_the_start(folders: dict[str, Path]) -> None:
    engine, info = build_engine(options(), folders)
    service = info.services["a"]
    assert engine.measure_speed(service, "a") == service  # no step runs on weights that are absent
    engine.close()


def test_weights_that_cannot_be_read_have_no_speed(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    use_image_cache(tmp_path / "cache", monkeypatch)
    read = build.measure_absent

    def damage(*arguments):
        for file in (tmp_path / "cache").glob("images/a-*/weights.bin"):
            os.truncate(file, 0)  # the engine has it open
        return read(*arguments)

    monkeypatch.setattr(build, "measure_absent", damage)
    _, info = build_engine(options(), folders)
    assert (info.services["a"].decode_s, info.services["b"].decode_s > 0) == (0, True)


def test_a_gpu_has_all_its_weights(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ConfigError, match=r"weights\.memory: on GPUs weights cannot come and go yet"):
        build_engine(options(device="cuda:0"), folders)


def test_without_a_limit_no_image_is_made(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    use_image_cache(tmp_path / "cache", monkeypatch)
    build_engine(options(None), folders)
    assert not (tmp_path / "cache" / "images").exists()
