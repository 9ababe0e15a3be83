"""Answers made by hand, and a target that answers when it is told to."""

import asyncio

from shoal.bench import Answer, Call, LoadRun
from shoal.core import NO_GOALS

MS = 1_000_000


def make_call(number=0, *, service="chat", at_ms=0, tokens=4, slo=NO_GOALS):
    return Call(
        id=f"r{number}",
        service=service,
        text="the of",
        output_tokens=tokens,
        arrival_ns=at_ms * MS,
        slo=slo,
    )


def make_answer(call, *, sent_ms=0, chunks_ms=(), tokens=None, finish="length", error=None, prompt_tokens=5):
    """Chunks at these times after the call was sent."""
    times = [(sent_ms + each) * MS for each in chunks_ms]
    return Answer(
        call,
        sent_ns=sent_ms * MS,
        end_ns=times[-1] if times else sent_ms * MS + MS,
        chunks_ns=times,
        prompt_tokens=prompt_tokens,
        output_tokens=len(times) if tokens is None else tokens,
        finish=finish,
        error=error,
    )


def make_run(answers, *, seconds=None):
    end_ns = max((answer.end_ns for answer in answers), default=0) if seconds is None else int(seconds * 1e9)
    return LoadRun(answers=list(answers), end_ns=end_ns, ended=len(answers))


class HeldTarget:
    """Answers a call when its event is set, and knows which are under way."""

    def __init__(self):
        self.under_way: list[str] = []
        self.most = 0
        self.sent: list[str] = []
        self.release: dict[str, asyncio.Event] = {}
        self.changed = asyncio.Event()

    async def send(self, answer):
        name = answer.call.id
        self.sent.append(name)
        self.under_way.append(name)
        self.most = max(self.most, len(self.under_way))
        self.release[name] = asyncio.Event()
        self.changed.set()
        await self.release[name].wait()
        self.under_way.remove(name)
        answer.finish = "stop"

    async def wait_for(self, count):
        """Wait until so many calls are under way."""
        while len(self.under_way) < count:
            self.changed.clear()
            await self.changed.wait()
