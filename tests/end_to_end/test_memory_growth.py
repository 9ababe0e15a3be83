"""A served engine does not grow over a thousand requests."""

import asyncio
from pathlib import Path

import psutil
import pytest
from execute_builders import VOCAB, make_model, make_prompt, tiny_config

from shoal.core import SamplingParams, Service
from shoal.engine import EngineHandle, EngineOptions
from shoal.kvcache import KVCacheOptions

GROWTH_LIMIT_BYTES = 12 << 20


class IdTokenizer:
    """Token ids as text."""

    vocab_size = VOCAB
    eos_token_ids = (2,)

    def decode(self, tokens: list[int], skip_special_tokens: bool = True) -> str:
        return "".join(f" {token}" for token in tokens)


def test_a_thousand_requests_leave_no_memory_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parent)
    folder = make_model(tmp_path / "m", tiny_config("llama"))

    async def one(handle: EngineHandle, number: int) -> None:
        sampling = SamplingParams(max_tokens=8, seed=number, ignore_eos=True)
        stream = await handle.submit("m", make_prompt(1 + number % 60, seed=number), sampling)
        async for _ in stream:
            if number % 3 == 0:
                break
        await stream.aclose()

    async def burst(handle: EngineHandle, numbers: range) -> None:
        for start in numbers[::50]:
            await asyncio.gather(*(one(handle, number) for number in range(start, start + 50)))

    async def main() -> None:
        options = EngineOptions(
            services=(Service(name="m", model="m"),), kv_cache=KVCacheOptions(memory_bytes=1 << 20)
        )
        handle = await EngineHandle.start(
            options, {"m": folder}, {"m": IdTokenizer()}, builder="checked_engine:build_checked_engine"
        )
        try:
            processes = [psutil.Process(), psutil.Process(handle.pid)]
            await burst(handle, range(300))
            before = [process.memory_info().rss for process in processes]
            await burst(handle, range(300, 1300))
            after = [process.memory_info().rss for process in processes]
            assert handle.unfinished == 0
            stats = await handle.stats()
            assert sum(s.finished + s.cancelled for s in stats.services.values()) == 1300
        finally:
            await handle.close()
        assert max(now - then for now, then in zip(after, before, strict=True)) < GROWTH_LIMIT_BYTES

    asyncio.run(main())
