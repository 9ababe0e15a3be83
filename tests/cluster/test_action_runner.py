"""What is decided while something takes longer: a grammar that an engine makes ready."""

import asyncio
from types import SimpleNamespace

import pytest
from engine_builders import ByteTokenizer, make_request

from shoal.cluster.action_runner import ActionRunner
from shoal.cluster.actions import Dispatch, Withdraw
from shoal.cluster.call import Call
from shoal.cluster.calls import Calls
from shoal.cluster.events import EngineAdded
from shoal.core import Grammar, GrammarKind, QueueFull, SamplingParams
from shoal.engine import wire
from shoal.engine.stream import Stream

EVENT = EngineAdded("0", ("a",))
GRAMMAR = SamplingParams(temperature=0.0, max_tokens=8, grammar=Grammar(GrammarKind.REGEX, "a+"))


class Engine:
    """Makes grammars ready when the test says so, one answer to a question."""

    def __init__(self) -> None:
        self.sent: list[wire.ToEngine] = []
        self.questions: asyncio.Queue[asyncio.Future[wire.Prepared]] = asyncio.Queue()

    def send(self, message: wire.ToEngine) -> None:
        self.sent.append(message)

    async def ask(self, make, kind) -> wire.Prepared:
        answer = asyncio.get_running_loop().create_future()
        self.questions.put_nowait(answer)
        return await answer


class Bench:
    """A runner whose manager decides what the test says, with one call and two engines."""

    def __init__(self) -> None:
        self.engines = {"0": Engine(), "1": Engine()}
        self.decided: list = []
        fleet = SimpleNamespace(
            engines=self.engines, send=lambda engine, message: self.engines[engine].send(message)
        )
        self.calls = Calls(fleet, lambda event: None, lambda: 0)
        request = make_request("c")
        stream = Stream("c", len(request.prompt), lambda: None)
        self.call = Call("c", {0: request}, GRAMMAR, ByteTokenizer(), (), stream, "c")
        self.calls.add(self.call)
        self.tasks: set[asyncio.Task] = set()
        manager = SimpleNamespace(handle=lambda event, now_ns: self.decided)
        self.runner = ActionRunner(
            manager,
            fleet,
            self.calls,
            None,
            clock=lambda: 0,
            spawn=lambda work: self.tasks.add(asyncio.ensure_future(work)),
            on_decision=None,
        )

    def decide(self, *actions) -> None:
        self.decided = list(actions)
        self.runner.tell(EVENT)

    def submitted(self, engine: str) -> list[str]:
        messages = [message for message in self.engines[engine].sent if isinstance(message, wire.Submit)]
        return [request.id for message in messages for request in message.to_requests()]


async def question(engine: Engine) -> asyncio.Future[wire.Prepared]:
    return await asyncio.wait_for(engine.questions.get(), 5)


async def answer(bench: Bench, asked: asyncio.Future[wire.Prepared], **fields) -> None:
    asked.set_result(wire.Prepared(1, **fields))
    await asyncio.sleep(0)
    await asyncio.sleep(0)


def test_a_call_is_sent_when_its_grammar_is_ready():
    async def scenario() -> None:
        bench = Bench()
        bench.decide(Dispatch("c", "0", 1, 1))
        asked = await question(bench.engines["0"])
        assert not bench.submitted("0")
        await answer(bench, asked)
        assert bench.submitted("0") == ["c-0#1"]
        assert bench.call.accepted.done()

    asyncio.run(scenario())


@pytest.mark.parametrize("fields", [{}, {"error": "too many grammars", "retry_after_s": 1.0}])
def test_a_call_that_was_taken_away_meanwhile_is_another_engines(fields):
    async def scenario() -> None:
        bench = Bench()
        bench.decide(Dispatch("c", "0", 1, 1))
        asked = await question(bench.engines["0"])
        bench.decide(Withdraw("c"))
        await answer(bench, asked, **fields)
        assert not bench.submitted("0")
        assert not bench.call.accepted.done()
        bench.decide(Dispatch("c", "1", 1, 2))
        await answer(bench, await question(bench.engines["1"]))
        assert bench.submitted("1") == ["c-0#2"]

    asyncio.run(scenario())


def test_a_call_ends_where_its_engine_has_too_many_grammars():
    async def scenario() -> None:
        bench = Bench()
        bench.decide(Dispatch("c", "0", 1, 1))
        await answer(bench, await question(bench.engines["0"]), error="too many", retry_after_s=1.0)
        with pytest.raises(QueueFull, match="too many"):
            await bench.call.accepted
        assert bench.calls.get("c") is None

    asyncio.run(scenario())
