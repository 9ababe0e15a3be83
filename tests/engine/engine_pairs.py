"""Pairs of engines in this process with migrations between them, and a client that sends the commands."""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from shoal.core import FinishReason, Request, TokenEvent, TokenLogprobs
from shoal.engine import Engine, wire
from shoal.engine.info import EngineInfo
from shoal.engine.migration import wire as migration_wire
from shoal.engine.migration.transfer import Transfer
from shoal.engine.migration.wire import (
    Abort,
    Commit,
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
from shoal.engine.process.server import EngineServer, Services

TIMEOUT_S = 30


class Link:
    """A link to a client in this thread."""

    from_client = True

    def __init__(self) -> None:
        self.frames: deque[bytes] = deque()
        self.received: deque[wire.FromEngine] = deque()
        self.lost = False

    def receive(self) -> bytes | None:
        return self.frames.popleft() if self.frames else None

    def lost_client(self) -> bool:
        lost, self.lost = self.lost, False
        return lost

    def has_messages(self) -> bool:
        return bool(self.frames) or self.lost

    def send(self, frame: bytes) -> None:
        self.received.append(wire.decode_from_engine(frame))

    def wait(self, timeout_ms: int | None) -> None:
        time.sleep(0.0005)


EMPTY_INFO = EngineInfo(
    services={}, device="cpu", threads=1, block_size=1, merged_blocks=1, kv_bytes=0, weight_bytes=0
)


class EngineHost:
    """An engine with its sockets; ``turn`` runs its server once."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.link = Link()
        self.transfer = Transfer("tcp://127.0.0.1:*")
        services = Services(engine, EMPTY_INFO, lambda info: None)
        self.server = EngineServer(engine, self.link, self.transfer, services)  # type: ignore[arg-type]

    def send(self, message: wire.ToEngine) -> None:
        self.link.frames.append(wire.encode(message))

    def submit(self, *requests: Request) -> None:
        for request in requests:
            self.send(wire.Submit.from_requests([request]))

    def turn(self) -> list[wire.FromEngine]:
        self.server.serve_once()
        self.check_blocks()
        received = list(self.link.received)
        self.link.received.clear()
        return received

    def check_blocks(self) -> None:
        scheduler = self.engine._scheduler
        self.engine._pool.check_integrity()
        if not self.engine._in_flight:
            self.engine._pool.check_integrity(
                {
                    name: [request.block_ids for request in state.running.requests]
                    + [lease.blocks for lease in scheduler.leases.of_service(name)]
                    for name, state in scheduler._services.items()
                }
            )

    @property
    def is_free(self) -> bool:
        """Whether the engine has no request and no blocks in use."""
        engine = self.engine
        pool = engine._pool
        return (
            not engine.busy
            and not len(engine._scheduler.leases)
            and all(pool.live_blocks(service) == 0 for service in pool.layout.services)
        )

    def close(self) -> None:
        self.transfer.close()
        self.engine.close()


@contextmanager
def hosts(*engines: Engine) -> Iterator[list[EngineHost]]:
    made = [EngineHost(engine) for engine in engines]
    try:
        yield made
    finally:
        for host in made:
            host.close()


@dataclass
class Answer:
    """The output of one request, under all of its ids."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish: FinishReason | None = None

    def add(self, event: TokenEvent) -> None:
        assert self.finish is None, "an event after the last one"
        assert event.position == len(self.tokens)
        self.tokens += event.tokens
        self.logprobs += event.logprobs or ()
        self.prompt_logprobs += event.prompt_logprobs or ()
        self.finish = event.finish


@dataclass
class Migration:
    """A migration of a test, and its state."""

    request: Request
    at: int
    """Output tokens after which it is exported; blocks are reserved from the start."""
    live: bool = True
    after_turns: int = 0
    """Turns between that and the export."""
    to: str = ""
    """Address for KV, if not the destination's."""
    state: str = "waiting"
    stopped: Stopped | None = None
    why: str = ""

    @property
    def id(self) -> str:
        return f"{self.request.id}-m"

    @property
    def new_id(self) -> str:
        return f"{self.request.id}#2"


Handler = Callable[["Client", Migration, migration_wire.FromEngine], bool]


class Client:
    """Migrates requests from the first host to the second, and checks their events.

    intercept: called with each reply before the client acts on it; True: the client does not act.
    """

    def __init__(
        self,
        source: EngineHost,
        destination: EngineHost,
        migrations: Sequence[Migration],
        intercept: Handler | None = None,
    ) -> None:
        self.source, self.destination = source, destination
        self.migrations = {migration.id: migration for migration in migrations}
        self.answers: dict[str, Answer] = {}
        self.owners: dict[str, tuple[EngineHost, str]] = {}
        self.intercept = intercept
        self.until = time.monotonic() + TIMEOUT_S
        self.log: list[migration_wire.FromEngine] = []

    def submit(self, host: EngineHost, *requests: Request) -> None:
        for request in requests:
            self.answers[request.id] = Answer()
            self.owners[request.id] = (host, request.id)
            host.submit(request)

    def run(self) -> None:
        """Run until all requests have ended, and no blocks are in use."""
        while any(answer.finish is None for answer in self.answers.values()) or not self.idle:
            self.turn()

    def run_requests(self) -> None:
        """Run until all requests have ended."""
        while any(answer.finish is None for answer in self.answers.values()):
            self.turn()

    @property
    def idle(self) -> bool:
        return self.source.is_free and self.destination.is_free

    def turn(self) -> None:
        assert time.monotonic() < self.until, ("stuck", self.log, self.answers, self.migrations)
        for host in (self.source, self.destination):
            for message in host.turn():
                self._handle(host, message)
            for migration in self.migrations.values():
                self._export_if_due(migration)

    def _export_if_due(self, migration: Migration) -> None:
        answer = self.answers.get(migration.request.id)
        if answer is None or answer.finish is not None:
            return
        if migration.state == "waiting":
            migration.state = "reserving"
            tokens = len(migration.request.prompt)
            self.destination.send(Reserve(migration.id, migration.request.service, tokens))
        elif migration.state == "reserved" and len(answer.tokens) >= migration.at:
            if migration.after_turns:
                migration.after_turns -= 1
                return
            migration.state = "copying"
            to = migration.to or self.destination.transfer.endpoint
            self.source.send(Export(migration.id, migration.request.id, to, migration.live))

    def _handle(self, host: EngineHost, message: wire.FromEngine) -> None:
        if isinstance(message, wire.Stepped):
            for event in message.events:
                self._add_event(host, event)
            return
        assert not isinstance(message, wire.Refused), message
        if isinstance(message, (wire.WeightsMoved, wire.Transitions)):
            return
        self.log.append(message)  # type: ignore[arg-type]
        migration = self.migrations.get(message.migration)  # type: ignore[union-attr]
        if migration is None:
            return
        if self.intercept is None or not self.intercept(self, migration, message):  # type: ignore[arg-type]
            self.respond(migration, message)  # type: ignore[arg-type]

    def _add_event(self, host: EngineHost, event: TokenEvent) -> None:
        name = event.request_id.partition("#")[0]
        assert self.owners[name] == (host, event.request_id), "an event from the wrong engine"
        answer = self.answers[name]
        answer.add(event)
        for migration in self.migrations.values():
            if migration.request.id != name:
                continue
            if migration.state == "committing":
                migration.state = "done"
                self.source.send(Release(migration.id))
            if answer.finish is not None and migration.state not in ("done", "waiting", "over"):
                self.source.send(Release(migration.id))
                self.destination.send(Drop(migration.id))

    def respond(self, migration: Migration, message: migration_wire.FromEngine) -> None:
        match message:
            case Reserved():
                if migration.state == "reserving":
                    migration.state = "reserved"
            case Declined(_, why):
                migration.state, migration.why = "over", why
            case NotExported(_, why):
                migration.state, migration.why = "over", why
                self.destination.send(Drop(migration.id))
            case Stopped():
                migration.stopped = message
                assert message.output_tokens == len(self.answers[migration.request.id].tokens)
                self.commit(migration)
            case Failed(_, why):
                migration.state, migration.why = "over", why
                self.abort(migration, f"{migration.request.id}#3")

    def commit(self, migration: Migration) -> None:
        migration.state = "committing"
        self.owners[migration.request.id] = (self.destination, migration.new_id)
        self.destination.send(self.commit_message(migration))

    def commit_message(self, migration: Migration) -> Commit:
        assert migration.stopped is not None
        tokens = tuple(self.answers[migration.request.id].tokens)
        request = replace(
            migration.request,
            id=migration.new_id,
            output_tokens=tokens,
            resume_state=migration.stopped.resume_state,
        )
        return Commit(migration.id, request, migration.stopped.computed)

    def abort(self, migration: Migration, request_id: str | None = None) -> None:
        """Abort, and resume the request at the source."""
        self.source.send(Abort(migration.id, request_id))
        self.owners[migration.request.id] = (self.source, request_id or migration.request.id)
