"""What engines say about calls whose grammars they make ready."""

import asyncio
from types import SimpleNamespace

import pytest
from engine_builders import ByteTokenizer, make_request

from shoal.cluster.manager.actions import Dispatch, Withdraw
from shoal.cluster.manager.events import EngineAdded
from shoal.cluster.router.action_runner import ActionRunner
from shoal.cluster.router.call import Call
from shoal.cluster.router.call_table import CallTable
from shoal.core import Grammar, GrammarKind, InvalidRequest, QueueFull, SamplingParams
from shoal.engine import wire
from shoal.frontend.stream import Stream

EVENT = EngineAdded("0", ("a",))
GRAMMAR = SamplingParams(temperature=0.0, max_tokens=8, grammar=Grammar(GrammarKind.REGEX, "a+"))


class Bench:
    """A runner whose manager decides what the test says, with one call and two engines."""

    def __init__(self) -> None:
        self.sent: dict[str, list[wire.ToEngine]] = {"0": [], "1": []}
        self.decided: list = []
        engines = {name: SimpleNamespace(send=sent.append) for name, sent in self.sent.items()}
        fleet = SimpleNamespace(
            engines=engines, send=lambda engine, message: self.sent[engine].append(message)
        )
        self.calls = CallTable(fleet, lambda event: None, lambda: 0)
        request = make_request("c", max_tokens=8)
        stream = Stream("c", len(request.prompt), lambda: None)
        self.call = Call("c", {0: request}, GRAMMAR, ByteTokenizer(), (), stream, "c")
        self.calls.add(self.call)
        manager = SimpleNamespace(handle=lambda event, now_ns: self.decided)
        self.runner = ActionRunner(manager, fleet, self.calls, None, clock=lambda: 0, on_decision=None)

    def decide(self, *actions) -> None:
        self.decided = list(actions)
        self.runner.process(EVENT)

    def submitted(self, engine: str) -> list[str]:
        messages = [message for message in self.sent[engine] if isinstance(message, wire.Submit)]
        return [request.id for message in messages for request in message.to_requests()]


def in_loop(scenario):
    async def run() -> None:
        scenario(Bench())

    asyncio.run(run())


def test_a_call_is_accepted_when_its_engine_says_so():
    @in_loop
    def scenario(bench):
        bench.decide(Dispatch("c", "0", 1, 1))
        assert bench.submitted("0") == ["c-0#1"]
        assert not bench.call.accepted.done()
        bench.calls.accepted(wire.Accepted("c-0#1"))
        assert bench.call.accepted.done()


@pytest.mark.parametrize("late", [wire.Accepted("c-0#1"), wire.Refused("c-0#1", "full", retry_after_s=1.0)])
def test_a_call_that_was_taken_away_meanwhile_is_another_engines(late):
    @in_loop
    def scenario(bench):
        bench.decide(Dispatch("c", "0", 1, 1))
        bench.decide(Withdraw("c"))
        assert bench.sent["0"][-1] == wire.Cancel(["c-0#1"])
        (bench.calls.accepted if isinstance(late, wire.Accepted) else bench.calls.refused)(late)
        assert not bench.call.accepted.done()
        bench.decide(Dispatch("c", "1", 1, 2))
        assert bench.submitted("1") == ["c-0#2"]
        bench.calls.accepted(wire.Accepted("c-0#2"))
        assert bench.call.accepted.result() is None


@pytest.mark.parametrize(
    ("refused", "error"),
    [
        (wire.Refused("c-0#1", "too many", retry_after_s=2.0), QueueFull),
        (wire.Refused("c-0#1", "too many", "grammar"), InvalidRequest),
    ],
)
def test_a_call_ends_where_its_engine_gives_its_grammar_no_place(refused, error):
    @in_loop
    def scenario(bench):
        bench.decide(Dispatch("c", "0", 1, 1))
        bench.calls.refused(refused)
        raised = bench.call.accepted.exception()
        assert type(raised) is error
        assert str(raised) == "too many"
        assert bench.calls.get("c") is None
