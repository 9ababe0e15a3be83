"""What waits for a slow reader takes no more memory than what is in it."""

import asyncio
import tracemalloc

from shoal.core import FinishReason, TokenLogprobs
from shoal.engine.reader import Delta
from shoal.engine.stream import Stream


def test_unread_deltas_become_one_for_each_choice():
    async def scenario():
        stream = Stream("call-1", 3, lambda: None)
        for i in range(600):
            for choice in (1, 0):
                logprobs = (TokenLogprobs(i, -1.0, ()),) if choice else None
                stream.push(Delta(choice=choice, text=f" {i}", tokens=(i,), logprobs=logprobs))
        stream.push(Delta(choice=1, finish=FinishReason.STOP, stop_reason="x", cached_tokens=2))
        stream.end()
        return [delta async for delta in stream]

    first, second = asyncio.run(scenario())
    text, tokens = "".join(f" {i}" for i in range(600)), tuple(range(600))
    assert (first.choice, first.text, first.tokens) == (1, text, tokens)
    assert [entry.token for entry in first.logprobs] == list(tokens)
    assert (first.finish, first.stop_reason, first.cached_tokens) == (FinishReason.STOP, "x", 2)
    assert second == Delta(choice=0, text=text, tokens=tokens)


def test_what_waits_takes_little_more_memory_than_its_text():
    async def scenario():
        stream = Stream("call-1", 3, lambda: None)
        tracemalloc.start()
        try:
            for _ in range(20_000):
                stream.push(Delta(choice=0, text="a", tokens=(7,)))
            return tracemalloc.get_traced_memory()[0]
        finally:
            tracemalloc.stop()

    # 180 kB of text and token ids; as deltas of their own they would be more than 2 MB.
    assert asyncio.run(scenario()) < 500_000
