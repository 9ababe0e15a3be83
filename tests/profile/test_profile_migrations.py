"""Rates of migrations, on engines whose executor detects lost KV."""

import time
from contextlib import closing
from dataclasses import replace

import pytest
from engine_builders import FakeExecutor, build_fake, make_options

from shoal.core import ConfigError
from shoal.profile.measure import profiling_options
from shoal.profile.migrations import MIGRATIONS, REPEATS, MigrationProfiler


def pair(blocks=400):
    options = profiling_options(make_options(blocks=blocks))
    (first, info), (second, _) = build_fake(options, {}), build_fake(options, {})
    return (first, second), info


def test_rates_are_those_of_the_slower_side(tmp_path, monkeypatch):
    engines, info = pair()
    reads, writes = FakeExecutor.read_blocks, FakeExecutor.write_blocks
    written = []

    def slow_write(self, service, blocks, content):
        time.sleep(0.003)
        written.append((time.perf_counter(), content.nbytes))
        writes(self, service, blocks, content)

    def read(self, service, blocks):
        time.sleep(0.001)
        return reads(self, service, blocks)

    monkeypatch.setattr(FakeExecutor, "write_blocks", slow_write)
    monkeypatch.setattr(FakeExecutor, "read_blocks", read)
    [name] = info.services
    told = []
    with closing(MigrationProfiler(engines, tmp_path)) as profiler:
        service = replace(info.services[name], vocab_size=256)
        rates = profiler.measure(name, service, lambda done, total: told.append((done, total)))
        assert not any(engine.busy for engine in engines)
        assert not any(len(engine._scheduler.leases) for engine in engines)
    assert told == [(done, REPEATS + 1) for done in range(1, REPEATS + 2)]
    assert len(written) == MIGRATIONS * (REPEATS + 1)
    most_bytes = max(size for _, size in written)
    assert most_bytes >= 4 * rates.prompt_tokens
    assert 0 < rates.take_bytes_per_s <= most_bytes / 0.003
    assert 0 < rates.send_bytes_per_s <= most_bytes / 0.001
    assert rates.kv_bytes_per_s == min(rates.take_bytes_per_s, rates.send_bytes_per_s)
    assert rates.prefill_tokens_per_s > 0


def test_a_pool_without_room_for_a_request_is_an_error(tmp_path):
    engines, info = pair(blocks=2)
    [name] = info.services
    with (
        closing(MigrationProfiler(engines, tmp_path)) as profiler,
        pytest.raises(ConfigError, match="too few to move a request; raise --kv-memory"),
    ):
        profiler.measure(name, info.services[name], lambda done, total: None)
