"""Streams: joined deltas and their memory for a slow reader."""

import asyncio
import tracemalloc

from shoal.core import FinishReason, TokenLogprobs
from shoal.frontend.reader import Delta
from shoal.frontend.stream import Stream


def test_unread_deltas_are_joined_within_bounds():
    async def scenario():
        stream = Stream("call-1", 3, lambda: None)
        for i in range(600):
            for choice in (1, 0):
                logprobs = (TokenLogprobs(i, -1.0, ()),) if choice else None
                stream.push(Delta(choice=choice, text=f" {i}", tokens=(i,), logprobs=logprobs))
        stream.push(Delta(choice=1, finish=FinishReason.STOP, stop_reason="x", cached_tokens=2))
        stream.end()
        return [delta async for delta in stream]

    deltas = asyncio.run(scenario())
    # Few deltas, and none that takes long to format.
    assert len(deltas) < 30
    assert max(len(delta.tokens) for delta in deltas) <= 100
    assert [delta.choice for delta in deltas] == sorted((delta.choice for delta in deltas), reverse=True)
    for choice in (0, 1):
        of_choice = [delta for delta in deltas if delta.choice == choice]
        assert "".join(delta.text for delta in of_choice) == "".join(f" {i}" for i in range(600))
        assert [token for delta in of_choice for token in delta.tokens] == list(range(600))
        logprobs = [entry.token for delta in of_choice for entry in delta.logprobs or ()]
        assert logprobs == (list(range(600)) if choice else [])
    ends = [delta for delta in deltas if delta.finish is not None]
    assert [(end.choice, end.finish, end.stop_reason, end.cached_tokens) for end in ends] == [
        (1, FinishReason.STOP, "x", 2)
    ]


def test_unread_deltas_take_little_more_memory_than_their_text():
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
