"""Migrations between engines without a model: commands in any order, and failures at any stage.

The executor reads every token back from the pool before it samples, so lost KV is detected.
"""

import time
from contextlib import closing, contextmanager
from dataclasses import replace

import pytest
from engine_builders import expected_tokens, make_engine, make_request
from engine_pairs import Client, Migration, hosts

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


def received(client, kind):
    return [message for message in client.log if isinstance(message, kind)]


@pytest.mark.parametrize(("depth", "iterations"), [(1, 1), (1, 4), (2, 1)])
@pytest.mark.parametrize("live", [True, False])
def test_a_request_migrates_after_any_token(depth, live, iterations):
    options = {"depth": depth, "max_iterations": iterations, "max_batched_tokens": 24}
    with pair(scheduler=options) as (source, destination):
        for at in range(0, OUTPUT, 3):
            requests = [ask(f"r{at}"), ask(f"s{at}", prompt=3, temperature=1.0, seed=at)]
            migrations = [Migration(request, at, live) for request in requests]
            client = Client(source, destination, migrations)
            client.submit(source, *requests, ask("o", prompt=50))
            client.run()
            check(client, *requests)
            for migration in migrations:
                assert migration.state == "done" or at == 0 or at > OUTPUT - 8 * iterations * depth


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("turns", range(1, 8))
def test_a_request_migrates_during_its_prefill(depth, turns):
    request = ask(prompt=60)
    with pair(scheduler={"depth": depth, "max_batched_tokens": 7}) as (source, destination):
        migration = Migration(request, 0, live=False, after_turns=turns)
        client = Client(source, destination, [migration])
        client.submit(source, request)
        client.run()
        check(client, request)
        assert migration.state == "done"
        assert 0 < migration.stopped.computed < 60
        assert destination.engine.stats().services["a"].recomputed_tokens == 0


def test_a_live_request_keeps_running_while_rounds_are_sent():
    """It is stopped when few blocks are left, and its events continue up to then."""
    request = ask(prompt=100, output=60)
    with pair() as (source, destination):
        client = Client(source, destination, [Migration(request, 5)])
        client.submit(source, request)
        client.run()
        check(client, request)
        assert [message.blocks for message in received(client, Copied)] == [(100 + 4) // 4]
        [stopped] = received(client, Stopped)
        assert stopped.output_tokens > 5
        assert stopped.computed == 100 + stopped.output_tokens - 1


def test_a_request_stopped_at_once_has_no_rounds():
    request = ask(prompt=100)
    with pair() as (source, destination):
        client = Client(source, destination, [Migration(request, 5, live=False)])
        client.submit(source, request)
        client.run()
        check(client, request)
        assert not received(client, Copied)


@pytest.mark.parametrize("live", [True, False])
def test_progress_is_sent_for_every_part(live, monkeypatch):
    """Else a client would time out in a large round."""
    monkeypatch.setattr("shoal.engine.migration.transfer.Transfer.message_bytes", 1)
    monkeypatch.setattr("shoal.engine.migration.transfer.Transfer.turn_bytes", 1)
    request = ask(prompt=60, output=60)
    with pair() as (source, destination):
        client = Client(source, destination, [Migration(request, 5, live)])
        client.submit(source, request)
        client.run()
        check(client, request)
        [stopped] = received(client, Stopped)
        copied = [message.blocks for message in received(client, Copied)]
        assert copied == list(range(1, -(-stopped.computed // 4)))


@pytest.mark.parametrize("slices", [False, True])
def test_a_destination_without_free_blocks_declines(slices):
    options = {} if not slices else {"scheduler": {"admission": Slice(tokens=8)}}
    request, large = ask(), ask("large", prompt=60, output=20)
    with pair(blocks=(200, 200 if slices else 22), **options) as (source, destination):
        migration = Migration(request, 10)
        client = Client(source, destination, [migration])
        client.submit(destination, large)
        for _ in range(3):
            client.turn()
        client.submit(source, request)
        client.run()
        check(client, request, large)
        assert [type(message) for message in client.log] == [Declined]


def test_a_migrated_request_respects_max_running():
    requests = [ask("r"), ask("s")]
    with pair(scheduler={"max_running": 1}) as (source, destination):
        client = Client(source, destination, [Migration(requests[0], 3)])
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
def test_an_aborted_migration_resumes_at_the_source(stage, live, depth):
    request = ask(prompt=60)
    others = [ask("o", prompt=20), ask("p", prompt=9)]
    aborted = []

    def abort(client, migration, message):
        if not isinstance(message, stage) or aborted:
            return bool(aborted)
        aborted.append(message)
        migration.state = "over"
        client.abort(migration, "r#3" if stage is Stopped else None)
        client.destination.send(Drop(migration.id))
        client.source.send(Abort(migration.id))  # again
        return True

    with pair(scheduler={"depth": depth}) as (source, destination):
        client = Client(source, destination, [Migration(request, 10, live)], abort)
        client.submit(source, request, *others)
        client.run()
        check(client, request, *others)
        assert aborted or (stage is Copied and not live)
        assert source.engine.stats().services["a"].recomputed_tokens == 0


@pytest.mark.parametrize("depth", [1, 2])
def test_a_failed_migration_resumes_at_the_source(depth):
    """Here the destination receives a Drop before the Commit."""
    request = ask(prompt=60)

    def drop(client, migration, message):
        if isinstance(message, Stopped):
            migration.stopped = message
            client.destination.send(Drop(migration.id))
            client.commit(migration)
            return True
        return False

    with pair(scheduler={"depth": depth}) as (source, destination):
        migration = Migration(request, 10)
        client = Client(source, destination, [migration], drop)
        client.submit(source, request)
        client.run()
        check(client, request)
        assert migration.why == "no room is kept for it, or not any more"


class DelayedTransfer:
    """Delays the KV that one engine sends to another until ``open`` is set."""

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


class DelayedClient(Client):
    """A client whose source sends through ``transfer``."""

    def __init__(self, transfer, *args, times=1):
        super().__init__(*args)
        self.transfer, self.times = transfer, times

    def turn(self):
        self.transfer.pump(self.times)
        super().turn()


@contextmanager
def delayed(source, destination, migrations, intercept=None, times=1):
    transfer = DelayedTransfer(destination)
    with closing(transfer.transfer):
        client = DelayedClient(transfer, source, destination, migrations, intercept, times=times)
        for migration in migrations:
            migration.to = transfer.transfer.endpoint
        yield client, transfer


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("times", [1, 2])
def test_a_commit_waits_for_late_or_duplicate_blocks(depth, times):
    request, other = ask(prompt=60), ask("o", output=30)
    with (
        pair(scheduler={"depth": depth}) as (source, destination),
        delayed(source, destination, [Migration(request, 10)], times=times) as (client, transfer),
    ):
        client.submit(source, request)
        client.submit(destination, other)
        [migration] = client.migrations.values()
        while migration.state != "committing":
            client.turn()
        client.turn()
        client.destination.send(client.commit_message(migration))  # again
        began_ns = time.monotonic_ns()
        for _ in range(20):
            client.turn()
        waited_ns = time.monotonic_ns() - began_ns
        assert migration.state == "committing"
        transfer.open = True
        while migration.state != "done":
            client.turn()
        # The gap includes the wait.
        batch = destination.engine._scheduler.services["a"].running
        [row] = [row for row, state in enumerate(batch.requests) if state.request.id == migration.new_id]
        assert batch.largest_gap_ns[row] >= waited_ns
        client.run()
        check(client, request, other)


@pytest.mark.parametrize("how", ["drop", "cancel"])
def test_a_waiting_commit_can_be_dropped_or_cancelled(how):
    request = ask(prompt=60)
    with (
        pair() as (source, destination),
        delayed(source, destination, [Migration(request, 10)]) as (client, transfer),
    ):
        client.submit(source, request)
        [migration] = client.migrations.values()
        while migration.state != "committing":
            client.turn()
        if how == "cancel":
            destination.send(wire.Cancel([migration.new_id]))
        destination.send(Drop(migration.id, migration.new_id))
        client.turn()
        assert destination.is_free
        assert migration.why == "it was dropped"
        transfer.open = True
        client.run()
        check(client, request)


def test_a_drop_of_a_running_request_is_ignored():
    request = ask(prompt=60)
    with pair() as (source, destination):
        client = Client(source, destination, [Migration(request, 10)])
        client.submit(source, request)
        [migration] = client.migrations.values()
        while migration.state != "done":
            client.turn()
        destination.send(Drop(migration.id, migration.new_id))
        destination.send(client.commit_message(migration))
        client.run()
        check(client, request)
        assert not received(client, Failed)


@pytest.mark.parametrize("fault", ["short", "long", "negative", "far", "empty", "form"])
def test_malformed_blocks_fail_only_their_migration(fault):
    request, other = ask(prompt=60), ask("o")

    def disturb(client, migration, message):
        if isinstance(message, Reserved):
            blocks = Blocks(migration.id, 0, 2)
            content = {"short": b"x" * 31, "long": b"x" * 33}.get(fault, b"\0" * 32)
            blocks = {
                "negative": Blocks(migration.id, -1, 2),
                "far": Blocks(migration.id, 10**6, 2),
                "empty": Blocks(migration.id, 0, 0),
            }.get(fault, blocks)
            to = client.destination.transfer.endpoint
            with closing(Transfer("tcp://127.0.0.1:*")) as stranger:
                assert stranger.can_send(to)
                if fault == "form":
                    stranger._receivers[to].send(b"hello")
                    stranger._receivers[to].send_multipart([b"hello", b"world"])
                stranger.send(to, blocks, memoryview(content))
            while not client.destination.transfer.can_receive():
                pass
        return False

    with pair() as (source, destination):
        client = Client(source, destination, [Migration(request, 10)], disturb)
        client.submit(source, request)
        client.submit(destination, other)
        client.run()
        check(client, request, other)
        # Blocks that came twice are written twice.
        assert len(received(client, Failed)) == (fault != "form")


def test_commands_about_unknown_migrations_are_answered_or_ignored():
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


def test_an_invalid_address_is_reported():
    request = ask()
    with pair() as (source, destination):
        migration = Migration(request, 10)
        migration.to = "nonsense"
        client = Client(source, destination, [migration])
        client.submit(source, request)
        client.run()
        check(client, request)
        assert "nonsense" in migration.why


def test_an_export_to_an_address_without_a_listener():
    """The request keeps running until it is stopped, or while the queue is full."""
    request, other = ask(prompt=60), ask("o", output=100)
    with closing(Transfer("tcp://127.0.0.1:*")) as gone:
        nowhere = gone.endpoint
    with pair() as (source, destination):
        migration = Migration(request, 10)
        migration.to = nowhere
        client = Client(source, destination, [migration])
        client.submit(source, request, other)
        while migration.state != "committing":
            client.turn()
        for _ in range(10):
            client.turn()
        destination.send(Drop(migration.id, migration.new_id))
        client.run()
        check(client, request, other)


@pytest.mark.parametrize("when", ["ends", "cancelled", "preempted"])
def test_an_export_ends_with_its_request(when):
    """The transfer is blocked, so that the export takes long."""
    request, other = ask(prompt=40, output=12), ask("o", prompt=8, output=60)
    with pair(blocks=(24, 200)) as (source, destination):
        migration = Migration(request, 3)
        client = Client(source, destination, [migration])
        client.submit(source, request)
        if when == "preempted":
            client.submit(source, other)
        writable = source.transfer.can_send
        source.transfer.can_send = lambda to: writable(to) and False
        while migration.state != "copying":
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
        assert not received(client, Stopped)
        if when != "cancelled":
            check(client, request)
        if when == "preempted":
            assert migration.why


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("stage", [Reserved, Copied, Stopped, "committing"])
def test_a_disconnect_ends_all_migrations(stage, depth):
    request, other = ask(prompt=60), ask("o")
    with (
        pair(scheduler={"depth": depth}) as (source, destination),
        delayed(source, destination, [Migration(request, 10)]) as (client, transfer),
    ):
        client.submit(source, request)
        client.submit(destination, other)
        [migration] = client.migrations.values()
        while not (migration.state == stage if stage == "committing" else received(client, stage)):
            client.turn()
        source.link.lost = destination.link.lost = True
        transfer.open = True
        for _ in range(6):
            for host in (source, destination):
                host.turn()
            transfer.pump()
        assert source.is_free
        assert destination.is_free


def test_a_request_that_runs_alone_takes_reserved_blocks():
    """Else it would wait forever if the client never ended the migration."""
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


def test_a_stopped_request_that_lost_its_kv_is_recomputed():
    request, other = ask(prompt=40, output=12), ask("o", prompt=30, output=50)

    def wait(client, migration, message):
        return isinstance(message, Stopped)

    with pair(blocks=(22, 200)) as (source, destination):
        migration = Migration(request, 3)
        client = Client(source, destination, [migration], wait)
        client.submit(source, request)
        while not received(client, Stopped):
            client.turn()
        client.submit(source, other)
        while client.answers["o"].finish is None:
            client.turn()
        client.abort(migration, "r#3")
        destination.send(Drop(migration.id))
        client.run()
        check(client, request, other)
        assert source.engine.stats().services["a"].recomputed_tokens > 0


def test_a_cancel_before_a_queued_command_is_not_lost():
    """Cancels are handled at once, commands when no plan is in flight."""
    request = ask(prompt=60)
    with pair() as (source, destination):
        migration = Migration(request, 10)
        client = Client(
            source,
            destination,
            [migration],
            lambda client, migration, received: isinstance(received, Stopped),
        )
        client.submit(source, request)
        while not received(client, Stopped):
            client.turn()
        source.send(Abort(migration.id, "r#3"))
        source.send(wire.Cancel(["r#3"]))
        [stopped] = received(client, Stopped)
        migration.stopped = stopped
        destination.send(client.commit_message(migration))
        destination.send(wire.Cancel([migration.new_id]))
        for _ in range(3):
            assert not source.turn()
            assert not destination.turn()
        assert source.is_free
        assert destination.is_free


def test_a_resumed_id_that_is_in_use_is_refused():
    request = ask(prompt=60)
    with pair() as (source, destination):
        migration = Migration(request, 10)
        client = Client(
            source,
            destination,
            [migration],
            lambda client, migration, received: isinstance(received, Stopped),
        )
        client.submit(source, request, ask("o", output=60))
        while not received(client, Stopped):
            client.turn()
        source.send(Abort(migration.id, "o"))
        [refused] = [answer for answer in source.turn() if isinstance(answer, wire.Refused)]
        assert refused.request_id == "o"
        assert len(source.engine._scheduler.leases) == 0


def test_a_request_that_does_not_fit_the_destination_resumes_at_the_source():
    """Its context is shorter than the request's limit."""
    request = ask(prompt=60, output=60)
    with hosts(make_engine("fake?context=256")[0], make_engine("fake?context=100")[0]) as made:
        source, destination = made
        migration = Migration(request, 10)
        client = Client(source, destination, [migration])
        client.submit(source, request)
        client.run()
        check(client, request)
        assert "takes 64 tokens" in migration.why or "takes 100 tokens" in migration.why


def test_reserved_blocks_delay_the_removal_of_their_service():
    """The service is removed when the migration has ended."""
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


def test_arriving_kv_wakes_an_idle_engine(tmp_path):
    """The link polls the transfer's socket, too."""
    link = ClientLink(f"ipc://{tmp_path}/e")
    with closing(Transfer(transfer_address(f"ipc://{tmp_path}/e"))) as mine:
        link.watch(mine.socket)
        assert mine.endpoint == f"ipc://{tmp_path}/e.kv"
        with closing(Transfer(f"ipc://{tmp_path}/other")) as other:
            assert other.can_send(mine.endpoint)
            other.send(mine.endpoint, Blocks("m", 0, 1), memoryview(b"x"))
            link.wait(20_000)
            assert mine.can_receive()
            arrived = mine.receive()
            assert (arrived.blocks, bytes(arrived.content)) == (Blocks("m", 0, 1), b"x")
            assert mine.receive() is None
    link.close()


def test_a_commit_waits_for_at_most_one_plan():
    """With two plans in flight, a Commit would wait for both."""
    request, other = ask(prompt=60), ask("o", output=100)
    with pair(scheduler={"depth": 2}) as (source, destination):
        client = Client(
            source, destination, [Migration(request, 10)], lambda *received: isinstance(received[2], Stopped)
        )
        client.submit(source, request)
        client.submit(destination, other)
        in_flight = []
        while not received(client, Stopped):
            client.turn()
            in_flight.append(len(destination.engine._in_flight))
        [migration], [stopped] = client.migrations.values(), received(client, Stopped)
        assert 1 in in_flight
        for _ in range(10):
            client.turn()
        assert len(destination.engine._in_flight) == 0, "the oldest is the only one, and has ended"
        migration.stopped = stopped
        client.commit(migration)
        while migration.state != "done":
            client.turn()
        client.turn()
        assert len(destination.engine._in_flight) == 1
        client.run()
        check(client, request, other)
