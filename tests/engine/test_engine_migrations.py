"""Orders about requests that move, in every order and with every mishap, on engines without a model.

Their executor reads every token back from the pool before it samples, so that KV that was lost is noticed.
"""

import time
from contextlib import closing, contextmanager
from dataclasses import replace

import pytest
from engine_builders import expected_tokens, make_engine, make_request
from engine_pairs import Client, Move, hosts

from shoal.core import FinishReason
from shoal.engine import wire
from shoal.engine.migration.transfer import Blocks, Transfer, transfer_address
from shoal.engine.migration.wire import (
    Abort,
    Commit,
    Copied,
    Declined,
    Drop,
    Export,
    Failed,
    NotExported,
    Release,
    Reserve,
    Reserved,
    Stopped,
)
from shoal.engine.process.client_link import ClientLink
from shoal.schedule import Slice

OUTPUT = 40


@contextmanager
def pair(*models, blocks=(200, 200), **options):
    engines = [make_engine(*models, blocks=count, **options)[0] for count in blocks]
    with hosts(*engines) as made:
        yield made


def ask(id="r", prompt=30, output=OUTPUT, **options):
    return make_request(id, prompt=prompt, max_tokens=output, **options)


def check(client, *requests):
    for request in requests:
        answer = client.answers[request.id]
        assert answer.tokens == expected_tokens(request, request.sampling.max_tokens)
        assert answer.finish is FinishReason.LENGTH


def told(client, kind):
    return [message for message in client.log if isinstance(message, kind)]


@pytest.mark.parametrize(("depth", "iterations"), [(1, 1), (1, 4), (2, 1)])
@pytest.mark.parametrize("live", [True, False])
def test_requests_move_after_every_token(depth, live, iterations):
    options = {"depth": depth, "max_iterations": iterations, "max_batched_tokens": 24}
    with pair(scheduler=options) as (source, destination):
        for at in range(0, OUTPUT, 3):
            requests = [ask(f"r{at}"), ask(f"s{at}", prompt=3, temperature=1.0, seed=at)]
            moves = [Move(request, at, live) for request in requests]
            client = Client(source, destination, moves)
            client.submit(source, *requests, ask("o", prompt=50))
            client.run()
            check(client, *requests)
            for move in moves:
                assert move.state == "done" or at == 0 or at > OUTPUT - 8 * iterations * depth


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("turns", range(1, 8))
def test_a_request_moves_within_its_prompt(depth, turns):
    request = ask(prompt=60)
    with pair(scheduler={"depth": depth, "max_batched_tokens": 7}) as (source, destination):
        move = Move(request, 0, live=False, after_turns=turns)
        client = Client(source, destination, [move])
        client.submit(source, request)
        client.run()
        check(client, request)
        assert move.state == "done"
        assert 0 < move.stopped.computed < 60
        assert destination.engine.stats().services["a"].recomputed_tokens == 0


def test_a_live_request_goes_on_while_rounds_are_sent():
    """It is stopped when little is left, and its tokens were told up to then."""
    request = ask(prompt=100, output=60)
    with pair() as (source, destination):
        client = Client(source, destination, [Move(request, 5)])
        client.submit(source, request)
        client.run()
        check(client, request)
        assert [message.blocks for message in told(client, Copied)] == [(100 + 4) // 4]
        [stopped] = told(client, Stopped)
        assert stopped.output_tokens > 5
        assert stopped.computed == 100 + stopped.output_tokens - 1


def test_a_request_that_is_stopped_at_once_has_no_rounds():
    request = ask(prompt=100)
    with pair() as (source, destination):
        client = Client(source, destination, [Move(request, 5, live=False)])
        client.submit(source, request)
        client.run()
        check(client, request)
        assert not told(client, Copied)


@pytest.mark.parametrize("live", [True, False])
def test_progress_is_told_of_every_part(live, monkeypatch):
    """A client that waits for a whole round of much KV would give it up."""
    monkeypatch.setattr("shoal.engine.migration.transfer.Transfer.message_bytes", 1)
    monkeypatch.setattr("shoal.engine.migration.transfer.Transfer.turn_bytes", 1)
    request = ask(prompt=60, output=60)
    with pair() as (source, destination):
        client = Client(source, destination, [Move(request, 5, live)])
        client.submit(source, request)
        client.run()
        check(client, request)
        [stopped] = told(client, Stopped)
        copied = [message.blocks for message in told(client, Copied)]
        assert copied == list(range(1, -(-stopped.computed // 4)))


@pytest.mark.parametrize("slices", [False, True])
def test_a_destination_without_room_declines(slices):
    options = {} if not slices else {"scheduler": {"admission": Slice(tokens=8)}}
    request, large = ask(), ask("large", prompt=60, output=20)
    with pair(blocks=(200, 200 if slices else 22), **options) as (source, destination):
        move = Move(request, 10)
        client = Client(source, destination, [move])
        client.submit(destination, large)
        for _ in range(3):
            client.turn()
        client.submit(source, request)
        client.run()
        check(client, request, large)
        assert [type(message) for message in client.log] == [Declined]


def test_nobody_runs_beside_as_many_as_may_run():
    requests = [ask("r"), ask("s")]
    with pair(scheduler={"max_running": 1}) as (source, destination):
        client = Client(source, destination, [Move(requests[0], 3)])
        client.submit(destination, requests[1])
        for _ in range(3):
            client.turn()
        client.submit(source, requests[0])
        client.run()
        check(client, *requests)
        assert [type(message) for message in client.log] == [Declined]


STAGES = (Reserved, Copied, Stopped)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("live", [True, False])
@pytest.mark.parametrize("stage", STAGES)
def test_an_abort_lets_the_request_go_on_at_the_source(stage, live, depth):
    request = ask(prompt=60)
    others = [ask("o", prompt=20), ask("p", prompt=9)]
    aborted = []

    def abort(client, move, message):
        if not isinstance(message, stage) or aborted:
            return bool(aborted)
        aborted.append(message)
        move.state = "over"
        client.abort(move, "r#3" if stage is Stopped else None)
        client.destination.send(Drop(move.id))
        client.source.send(Abort(move.id))  # doubled
        return True

    with pair(scheduler={"depth": depth}) as (source, destination):
        client = Client(source, destination, [Move(request, 10, live)], abort)
        client.submit(source, request, *others)
        client.run()
        check(client, request, *others)
        assert aborted or (stage is Copied and not live)
        assert source.engine.stats().services["a"].recomputed_tokens == 0


@pytest.mark.parametrize("depth", [1, 2])
def test_what_fails_at_the_destination_goes_on_at_the_source(depth):
    """The destination is told to drop what it has begun to wait for."""
    request = ask(prompt=60)

    def drop(client, move, message):
        if isinstance(message, Stopped):
            move.stopped = message
            client.destination.send(Drop(move.id))
            client.commit(move)
            return True
        return False

    with pair(scheduler={"depth": depth}) as (source, destination):
        move = Move(request, 10)
        client = Client(source, destination, [move], drop)
        client.submit(source, request)
        client.run()
        check(client, request)
        assert move.why == "no room is kept for it, or not any more"


class Withheld:
    """What one engine sends to another goes through here, and waits until it is let go."""

    def __init__(self, destination):
        self.transfer = Transfer("tcp://127.0.0.1:*")
        self.to = destination.transfer.endpoint
        self.kept = []
        self.open = False

    def pump(self, times=1):
        while (arrived := self.transfer.receive()) is not None:
            self.kept.append(arrived)
        if self.open:
            for arrived in self.kept:
                for _ in range(times):
                    assert self.transfer.can_send(self.to)
                    self.transfer.send(self.to, arrived.blocks, arrived.content)
            self.kept.clear()


class Through(Client):
    """A client whose source sends through ``withheld``."""

    def __init__(self, withheld, *args, times=1):
        super().__init__(*args)
        self.withheld, self.times = withheld, times

    def turn(self):
        self.withheld.pump(self.times)
        super().turn()


@contextmanager
def through(source, destination, moves, intercept=None, times=1):
    withheld = Withheld(destination)
    with closing(withheld.transfer):
        client = Through(withheld, source, destination, moves, intercept, times=times)
        for move in moves:
            move.to = withheld.transfer.endpoint
        yield client, withheld


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("times", [1, 2])
def test_a_commit_waits_for_bytes_that_are_late_or_doubled(depth, times):
    request, other = ask(prompt=60), ask("o", output=30)
    with (
        pair(scheduler={"depth": depth}) as (source, destination),
        through(source, destination, [Move(request, 10)], times=times) as (client, withheld),
    ):
        client.submit(source, request)
        client.submit(destination, other)
        [move] = client.moves.values()
        while move.state != "committing":
            client.turn()
        client.turn()
        client.destination.send(client.commit_order(move))  # doubled
        began_ns = time.monotonic_ns()
        for _ in range(20):
            client.turn()
        waited_ns = time.monotonic_ns() - began_ns
        assert move.state == "committing"
        withheld.open = True
        while move.state != "done":
            client.turn()
        # Its client has waited, too.
        batch = destination.engine._scheduler.services["a"].running
        [row] = [row for row, state in enumerate(batch.requests) if state.request.id == move.new_id]
        assert batch.largest_gap_ns[row] >= waited_ns
        client.run()
        check(client, request, other)


@pytest.mark.parametrize("how", ["drop", "cancel"])
def test_a_commit_that_waits_for_bytes_can_be_taken_back(how):
    request = ask(prompt=60)
    with (
        pair() as (source, destination),
        through(source, destination, [Move(request, 10)]) as (client, withheld),
    ):
        client.submit(source, request)
        [move] = client.moves.values()
        while move.state != "committing":
            client.turn()
        if how == "cancel":
            destination.send(wire.Cancel([move.new_id]))
        destination.send(Drop(move.id, move.new_id))
        client.turn()
        assert destination.is_free
        assert move.why == "it was dropped"
        withheld.open = True
        client.run()
        check(client, request)


def test_a_drop_of_a_request_that_runs_does_nothing():
    request = ask(prompt=60)
    with pair() as (source, destination):
        client = Client(source, destination, [Move(request, 10)])
        client.submit(source, request)
        [move] = client.moves.values()
        while move.state != "done":
            client.turn()
        destination.send(Drop(move.id, move.new_id))
        destination.send(client.commit_order(move))
        client.run()
        check(client, request)
        assert not told(client, Failed)


@pytest.mark.parametrize("fault", ["short", "long", "negative", "far", "empty", "form"])
def test_bytes_of_the_wrong_form_fail_the_migration_and_nobody_else(fault):
    request, other = ask(prompt=60), ask("o")

    def disturb(client, move, message):
        if isinstance(message, Reserved):
            blocks = Blocks(move.id, 0, 2)
            content = {"short": b"x" * 31, "long": b"x" * 33}.get(fault, b"\0" * 32)
            blocks = {
                "negative": Blocks(move.id, -1, 2),
                "far": Blocks(move.id, 10**6, 2),
                "empty": Blocks(move.id, 0, 0),
            }.get(fault, blocks)
            to = client.destination.transfer.endpoint
            with closing(Transfer("tcp://127.0.0.1:*")) as stranger:
                assert stranger.can_send(to)
                if fault == "form":
                    stranger._receivers[to].send(b"hello")
                    stranger._receivers[to].send_multipart([b"hello", b"world"])
                stranger.send(to, blocks, memoryview(content))
            while not client.destination.transfer.has_news():
                pass
        return False

    with pair() as (source, destination):
        client = Client(source, destination, [Move(request, 10)], disturb)
        client.submit(source, request)
        client.submit(destination, other)
        client.run()
        check(client, request, other)
        # Blocks that came twice are written twice.
        assert len(told(client, Failed)) == (fault != "form")


def test_orders_about_nobody_are_answered_or_ignored():
    with pair() as (source, destination):
        to = destination.transfer.endpoint
        source.send(Export("m", "unknown", to, True))
        source.send(Abort("m2"))
        source.send(Release("m2"))
        destination.send(Drop("m2"))
        destination.send(Drop("m3", "r#2"))
        destination.send(Commit("m4", ask(), 3))
        destination.send(Reserve("m5", "no such service", 3))
        answers = source.turn() + destination.turn()
        assert [(type(answer), answer.migration) for answer in answers] == [
            (NotExported, "m"),
            (Failed, "m3"),
            (Failed, "m4"),
            (Declined, "m5"),
        ]
        assert source.is_free
        assert destination.is_free


def test_an_address_that_means_nothing_is_told():
    request = ask()
    with pair() as (source, destination):
        move = Move(request, 10)
        move.to = "nonsense"
        client = Client(source, destination, [move])
        client.submit(source, request)
        client.run()
        check(client, request)
        assert "nonsense" in move.why


def test_nobody_is_there_to_take_the_bytes():
    """The request goes on until it is stopped, or as long as the queue takes no more."""
    request, other = ask(prompt=60), ask("o", output=100)
    with closing(Transfer("tcp://127.0.0.1:*")) as gone:
        nowhere = gone.endpoint
    with pair() as (source, destination):
        move = Move(request, 10)
        move.to = nowhere
        client = Client(source, destination, [move])
        client.submit(source, request, other)
        while move.state != "committing":
            client.turn()
        for _ in range(10):
            client.turn()
        destination.send(Drop(move.id, move.new_id))
        client.run()
        check(client, request, other)


@pytest.mark.parametrize("when", ["ends", "cancelled", "preempted"])
def test_an_export_ends_with_its_request(when):
    """The destination takes nothing, so that the export is under way for long."""
    request, other = ask(prompt=40, output=12), ask("o", prompt=8, output=60)
    with pair(blocks=(24, 200)) as (source, destination):
        move = Move(request, 3)
        client = Client(source, destination, [move])
        client.submit(source, request)
        if when == "preempted":
            client.submit(source, other)
        writable = source.transfer.can_send
        source.transfer.can_send = lambda to: writable(to) and False
        while move.state != "copying":
            client.turn()
        client.turn()
        if when == "cancelled":
            source.send(wire.Cancel([request.id]))
        if when == "preempted":
            source.engine._scheduler.preempt_all()
        else:
            while client.answers["r"].finish is None:
                client.turn()
        source.transfer.can_send = writable
        client.run()
        assert not told(client, Stopped)
        if when != "cancelled":
            check(client, request)
        if when == "preempted":
            assert move.why


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("stage", [Reserved, Copied, Stopped, "committing"])
def test_a_client_that_is_gone_leaves_nothing_behind(stage, depth):
    request, other = ask(prompt=60), ask("o")
    with (
        pair(scheduler={"depth": depth}) as (source, destination),
        through(source, destination, [Move(request, 10)]) as (client, withheld),
    ):
        client.submit(source, request)
        client.submit(destination, other)
        [move] = client.moves.values()
        while not (move.state == stage if stage == "committing" else told(client, stage)):
            client.turn()
        source.link.lost = destination.link.lost = True
        withheld.open = True
        for _ in range(6):
            for host in (source, destination):
                host.turn()
            withheld.pump()
        assert source.is_free
        assert destination.is_free


def test_one_request_alone_takes_what_is_kept_for_others():
    """It would wait for ever else, if whoever ordered the room forgot it."""
    request = ask(prompt=40, output=40)
    with pair(blocks=(22, 22)) as (source, destination):
        client = Client(source, destination, [])
        client.submit(destination, request)
        client.turn()
        destination.send(Reserve("m", "a", 20))
        client.run_requests()
        check(client, request)
        destination.send(Commit("m", replace(ask("s"), resume_state=None), 3))
        answers = [answer for answer in destination.turn() if not isinstance(answer, wire.Stepped)]
        assert [type(answer) for answer in answers] == [Failed]
        assert destination.is_free


def test_a_held_request_whose_kv_was_needed_is_computed_again():
    request, other = ask(prompt=40, output=12), ask("o", prompt=30, output=50)

    def wait(client, move, message):
        return isinstance(message, Stopped)

    with pair(blocks=(22, 200)) as (source, destination):
        move = Move(request, 3)
        client = Client(source, destination, [move], wait)
        client.submit(source, request)
        while not told(client, Stopped):
            client.turn()
        client.submit(source, other)
        while client.answers["o"].finish is None:
            client.turn()
        client.abort(move, "r#3")
        destination.send(Drop(move.id))
        client.run()
        check(client, request, other)
        assert source.engine.stats().services["a"].recomputed_tokens > 0


def test_a_cancel_between_an_order_and_its_turn_is_not_lost():
    """Cancels are carried out at once, orders when no plan is in flight."""
    request = ask(prompt=60)
    with pair() as (source, destination):
        move = Move(request, 10)
        client = Client(source, destination, [move], lambda client, move, told: isinstance(told, Stopped))
        client.submit(source, request)
        while not told(client, Stopped):
            client.turn()
        source.send(Abort(move.id, "r#3"))
        source.send(wire.Cancel(["r#3"]))
        [stopped] = told(client, Stopped)
        move.stopped = stopped
        destination.send(client.commit_order(move))
        destination.send(wire.Cancel([move.new_id]))
        for _ in range(3):
            assert not source.turn()
            assert not destination.turn()
        assert source.is_free
        assert destination.is_free


def test_an_id_that_is_in_use_is_refused():
    request = ask(prompt=60)
    with pair() as (source, destination):
        move = Move(request, 10)
        client = Client(source, destination, [move], lambda client, move, told: isinstance(told, Stopped))
        client.submit(source, request, ask("o", output=60))
        while not told(client, Stopped):
            client.turn()
        source.send(Abort(move.id, "o"))
        [refused] = [answer for answer in source.turn() if isinstance(answer, wire.Refused)]
        assert refused.request_id == "o"
        assert len(source.engine._scheduler.leases) == 0


def test_a_request_that_the_destination_cannot_take_goes_on_at_the_source():
    """Its context is shorter than what the request was promised."""
    request = ask(prompt=60, output=60)
    with hosts(make_engine("fake?context=256")[0], make_engine("fake?context=100")[0]) as made:
        source, destination = made
        move = Move(request, 10)
        client = Client(source, destination, [move])
        client.submit(source, request)
        client.run()
        check(client, request)
        assert "room for 64 tokens" in move.why or "room for 100 tokens" in move.why


def test_leases_count_in_the_service_that_goes():
    """A service with room kept for somebody stays until that is given up."""
    with pair("fake", "fake") as (_, destination):
        destination.send(Reserve("m", "a", 20))
        destination.turn()
        removed = destination.engine.remove_service("a", drain=True)
        for _ in range(3):
            destination.turn()
        assert not removed.done()
        destination.send(Drop("m"))
        for _ in range(3):
            destination.turn()
        assert removed.done()


def test_two_messages_are_enough_for_an_engine_that_waits(tmp_path):
    """An idle engine's wait ends when KV comes: the address is watched by its link."""
    link = ClientLink(f"ipc://{tmp_path}/e")
    with closing(Transfer(transfer_address(f"ipc://{tmp_path}/e"))) as mine:
        link.watch(mine.socket)
        assert mine.endpoint == f"ipc://{tmp_path}/e.kv"
        with closing(Transfer(f"ipc://{tmp_path}/other")) as other:
            assert other.can_send(mine.endpoint)
            other.send(mine.endpoint, Blocks("m", 0, 1), memoryview(b"x"))
            link.wait(20_000)
            assert mine.has_news()
            arrived = mine.receive()
            assert (arrived.blocks, bytes(arrived.content)) == (Blocks("m", 0, 1), b"x")
            assert mine.receive() is None
    link.close()


def test_who_is_about_to_come_waits_for_no_more_than_a_plan():
    """With two plans in flight, a Commit would wait for both."""
    request, other = ask(prompt=60), ask("o", output=100)
    with pair(scheduler={"depth": 2}) as (source, destination):
        client = Client(source, destination, [Move(request, 10)], lambda *told: isinstance(told[2], Stopped))
        client.submit(source, request)
        client.submit(destination, other)
        in_flight = []
        while not told(client, Stopped):
            client.turn()
            in_flight.append(len(destination.engine._in_flight))
        [move], [stopped] = client.moves.values(), told(client, Stopped)
        assert 1 in in_flight
        for _ in range(10):
            client.turn()
        assert len(destination.engine._in_flight) == 0, "the oldest is the only one, and has ended"
        move.stopped = stopped
        client.commit(move)
        while move.state != "done":
            client.turn()
        client.turn()
        assert len(destination.engine._in_flight) == 1
        client.run()
        check(client, request, other)
