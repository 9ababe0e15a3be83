"""Places for grammars in an engine process: from the acceptance of a request to its end."""

from concurrent.futures import Future
from dataclasses import replace

import pytest
from engine_builders import make_engine
from test_engine_process import Frames, Over, serve

from shoal.core import FinishReason, Grammar, GrammarKind, InvalidRequest, ResumeState, SamplingParams
from shoal.engine import wire
from shoal.execute.grammar import pool as grammar_pool
from shoal.execute.grammar.fork_server import GrammarModel
from shoal.execute.grammar.pool import MAX_PROCESSES, GrammarPool
from shoal.frontend.choice_requests import expand_choices

MODEL = GrammarModel("folder", 256, (0,))


class Worker:
    """A fake compiler; grammars that begin with "slow" wait for the test, those with "bad" fail."""

    def __init__(self, grammar, *_):
        self.grammar = grammar
        self.compiled = Future()
        self.num_leases = 0
        self.closed = False
        if grammar.source.startswith("bad"):
            self.compiled.set_exception(InvalidRequest("it is bad", "grammar"))
        elif not grammar.source.startswith("slow"):
            self.compiled.set_result(None)

    @property
    def failed(self):
        return self.compiled.done() and self.compiled.exception() is not None

    def close(self):
        self.closed = True


@pytest.fixture
def engine(monkeypatch):
    monkeypatch.setattr(grammar_pool, "GrammarWorker", Worker)
    engine, engine.info = make_engine(blocks=2000)
    engine._grammars.pool = GrammarPool({"a": MODEL})
    return engine


def call(source, *, tokens=4, n=1, output=None):
    """A call with a grammar; output: made by another engine before."""
    grammar = None if source is None else Grammar(GrammarKind.REGEX, source)
    sampling = SamplingParams(max_tokens=tokens, n=n, grammar=grammar)
    requests = expand_choices(f"call-{source}", "a", [97] * 8, sampling, 0)
    if output is not None:
        state = ResumeState(max_new_tokens=tokens)
        requests = [replace(request, output_tokens=output, resume_state=state) for request in requests]
    return wire.Submit.from_requests(requests)


def said(link, kind):
    return [message for message in link.sent if isinstance(message, kind)]


def ends(link):
    events = [event for message in said(link, wire.Stepped) for event in message.events]
    return {event.request_id: event.finish for event in events if event.finish is not None}


def places(engine):
    """Number of leased grammars."""
    return sum(worker.num_leases > 0 for worker in engine._grammars.pool._workers.values())


def test_accepted_calls_complete_and_further_ones_get_queue_full(engine):
    link = Frames(*(call(f"g{number}") for number in range(122)))
    serve(engine, engine.info, link)
    accepted = [message.request_id for message in said(link, wire.Accepted)]
    refused = {message.request_id: message for message in said(link, wire.Refused)}
    assert len(accepted) == MAX_PROCESSES
    assert len(refused) == 122 - MAX_PROCESSES
    assert all(message.retry_after_s and "64" in message.message for message in refused.values())
    assert ends(link) == dict.fromkeys(accepted, FinishReason.LENGTH)
    assert places(engine) == 0


def test_a_waiting_request_keeps_its_place(engine):
    """Many more requests wait than run, and as many more arrive."""
    first = [call(f"g{number}", tokens=30) for number in range(62)]

    class Later(Frames):
        def wait(self, timeout_ms):
            raise Over

        def receive(self):
            if not self.frames and said(self, wire.Stepped) and later:
                self.frames, later[:] = list(later), []
            return super().receive()

    later = [wire.encode(call(f"h{number}")) for number in range(60)]
    link = Later(*first)
    serve(engine, engine.info, link)
    names = [message.request.id for message in first]
    assert {name: ends(link)[name] for name in names} == dict.fromkeys(names, FinishReason.LENGTH)
    assert len(said(link, wire.Accepted)) + len(said(link, wire.Refused)) == 122
    assert set(ends(link).values()) == {FinishReason.LENGTH}
    assert said(link, wire.Refused)


def test_steps_go_on_while_a_grammar_is_compiled(engine):
    slow, plain = call("slow"), call(None, tokens=20)
    link = Frames(slow, plain)
    serve(engine, engine.info, link)
    assert ends(link) == {plain.request.id: FinishReason.LENGTH}
    assert not said(link, wire.Accepted)
    assert places(engine) == 1


def test_an_invalid_grammar_is_rejected(engine):
    link = Frames(call("bad"))
    serve(engine, engine.info, link)
    [refused] = said(link, wire.Refused)
    assert (refused.message, refused.param, refused.retry_after_s) == ("it is bad", "grammar", None)
    assert places(engine) == 0


def test_a_call_cancelled_during_compilation_releases_its_place(engine):
    slow = call("slow", n=3)
    link = Frames(slow, wire.Cancel([choice.id for choice in slow.choices]))
    serve(engine, engine.info, link)
    assert not link.sent
    assert places(engine) == 0


def test_choices_hold_one_place_until_the_last_has_ended(engine):
    engine.submit(*call("g", n=2).to_requests())
    assert places(engine) == 1
    first, second = (choice.id for choice in call("g", n=2).choices)
    engine.cancel(first)
    engine.step()
    assert places(engine) == 1
    assert engine.detach(second) is not None
    assert places(engine) == 0


def test_a_rejected_request_takes_no_place(engine):
    [request] = call("g").to_requests()
    engine.submit(request)
    with pytest.raises(InvalidRequest, match="in use"):
        engine.submit(request)
    assert places(engine) == 1


def test_a_resumed_call_waits_for_a_place(engine, monkeypatch):
    monkeypatch.setattr(grammar_pool, "MAX_PROCESSES", 1)
    resumed = call("g1", output=(5, 6))
    link = Frames(call("g0", tokens=9), resumed, call("g2"))
    serve(engine, engine.info, link)
    assert [message.request_id for message in said(link, wire.Refused)] == ["call-g2-0"]
    assert ends(link) == dict.fromkeys(["call-g0-0", "call-g1-0"], FinishReason.LENGTH)
