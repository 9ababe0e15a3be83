"""Engines in this process between which requests move, and a client that gives the orders."""

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

TIMEOUT_S = 5


class Link:
    """A link to a client in this thread."""

    from_client = True

    def __init__(self) -> None:
        self.frames: deque[bytes] = deque()
        self.told: deque[wire.FromEngine] = deque()
        self.lost = False

    def receive(self) -> bytes | None:
        return self.frames.popleft() if self.frames else None

    def lost_client(self) -> bool:
        lost, self.lost = self.lost, False
        return lost

    def has_news(self) -> bool:
        return bool(self.frames) or self.lost

    def send(self, frame: bytes) -> None:
        self.told.append(wire.decode_from_engine(frame))

    def wait(self, timeout_ms: int | None) -> None:
        time.sleep(0.0005)


NOTHING_TOLD = EngineInfo(
    services={}, device="cpu", threads=1, block_size=1, merged_blocks=1, kv_bytes=0, weight_bytes=0
)


class Host:
    """An engine with its sockets; ``turn`` lets it work."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.link = Link()
        self.transfer = Transfer("tcp://127.0.0.1:*")
        services = Services(engine, NOTHING_TOLD, lambda info: None)
        self.server = EngineServer(engine, self.link, self.transfer, services)  # type: ignore[arg-type]

    def send(self, message: wire.ToEngine) -> None:
        self.link.frames.append(wire.encode(message))

    def submit(self, *requests: Request) -> None:
        for request in requests:
            self.send(wire.Submit.from_requests([request]))

    def turn(self) -> list[wire.FromEngine]:
        self.server.serve_once()
        self.check_books()
        told = list(self.link.told)
        self.link.told.clear()
        return told

    def check_books(self) -> None:
        scheduler = self.engine._scheduler
        self.engine._pool.check_integrity()
        if not self.engine._in_flight:
            self.engine._pool.check_integrity(
                {
                    name: [request.block_ids for request in state.running.requests]
                    + [lease.blocks for lease in scheduler.leases.of(name)]
                    for name, state in scheduler._services.items()
                }
            )

    @property
    def is_free(self) -> bool:
        """Whether nothing is left of any request."""
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
def hosts(*engines: Engine) -> Iterator[list[Host]]:
    made = [Host(engine) for engine in engines]
    try:
        yield made
    finally:
        for host in made:
            host.close()


@dataclass
class Answer:
    """What was told of one request, whatever its ids."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish: FinishReason | None = None

    def add(self, event: TokenEvent) -> None:
        assert self.finish is None, "told something behind its end"
        assert event.position == len(self.tokens)
        self.tokens += event.tokens
        self.logprobs += event.logprobs or ()
        self.prompt_logprobs += event.prompt_logprobs or ()
        self.finish = event.finish


@dataclass
class Move:
    """A migration that a test wants, and how far it is."""

    request: Request
    at: int
    """Output tokens after which it is exported; room is reserved from the beginning."""
    live: bool = True
    after_turns: int = 0
    """So many turns with that many tokens before that."""
    to: str = ""
    """Where KV is sent, if not to the destination."""
    state: str = "waiting"
    stopped: Stopped | None = None
    why: str = ""

    @property
    def id(self) -> str:
        return f"{self.request.id}-m"

    @property
    def new_id(self) -> str:
        return f"{self.request.id}#2"


Handler = Callable[["Client", Move, migration_wire.FromEngine], bool]


class Client:
    """Orders migrations from the first host to the second, and follows the requests.

    intercept: sees what is told of migrations before it is acted on; True: the client does not act.
    """

    def __init__(
        self, source: Host, destination: Host, moves: Sequence[Move], intercept: Handler | None = None
    ) -> None:
        self.source, self.destination = source, destination
        self.moves = {move.id: move for move in moves}
        self.answers: dict[str, Answer] = {}
        self.owners: dict[str, tuple[Host, str]] = {}
        self.intercept = intercept
        self.until = time.monotonic() + TIMEOUT_S
        self.log: list[migration_wire.FromEngine] = []

    def submit(self, host: Host, *requests: Request) -> None:
        for request in requests:
            self.answers[request.id] = Answer()
            self.owners[request.id] = (host, request.id)
            host.submit(request)

    def run(self) -> None:
        """Until all requests have ended, and nothing is left of them."""
        while any(answer.finish is None for answer in self.answers.values()) or not self.idle:
            self.turn()

    def run_requests(self) -> None:
        """Until all requests have ended."""
        while any(answer.finish is None for answer in self.answers.values()):
            self.turn()

    @property
    def idle(self) -> bool:
        return self.source.is_free and self.destination.is_free

    def turn(self) -> None:
        assert time.monotonic() < self.until, ("stuck", self.log, self.answers, self.moves)
        for host in (self.source, self.destination):
            for message in host.turn():
                self._hear(host, message)
            for move in self.moves.values():
                self._order_if_due(move)

    def _order_if_due(self, move: Move) -> None:
        answer = self.answers.get(move.request.id)
        if answer is None or answer.finish is not None:
            return
        if move.state == "waiting":
            move.state = "reserving"
            tokens = len(move.request.prompt)
            self.destination.send(Reserve(move.id, move.request.service, tokens))
        elif move.state == "reserved" and len(answer.tokens) >= move.at:
            if move.after_turns:
                move.after_turns -= 1
                return
            move.state = "copying"
            to = move.to or self.destination.transfer.endpoint
            self.source.send(Export(move.id, move.request.id, to, move.live))

    def _hear(self, host: Host, message: wire.FromEngine) -> None:
        if isinstance(message, wire.Stepped):
            for event in message.events:
                self._follow(host, event)
            return
        assert not isinstance(message, wire.Refused), message
        self.log.append(message)  # type: ignore[arg-type]
        move = self.moves.get(message.migration)  # type: ignore[union-attr]
        if move is None:
            return
        if self.intercept is None or not self.intercept(self, move, message):  # type: ignore[arg-type]
            self.act(move, message)  # type: ignore[arg-type]

    def _follow(self, host: Host, event: TokenEvent) -> None:
        name = event.request_id.partition("#")[0]
        assert self.owners[name] == (host, event.request_id), "told by somebody who does not own it"
        answer = self.answers[name]
        answer.add(event)
        for move in self.moves.values():
            if move.request.id != name:
                continue
            if move.state == "committing":
                move.state = "done"
                self.source.send(Release(move.id))
            if answer.finish is not None and move.state not in ("done", "waiting", "over"):
                self.source.send(Release(move.id))
                self.destination.send(Drop(move.id))

    def act(self, move: Move, message: migration_wire.FromEngine) -> None:
        match message:
            case Reserved():
                if move.state == "reserving":
                    move.state = "reserved"
            case Declined(_, why):
                move.state, move.why = "over", why
            case NotExported(_, why):
                move.state, move.why = "over", why
                self.destination.send(Drop(move.id))
            case Stopped():
                move.stopped = message
                assert message.output_tokens == len(self.answers[move.request.id].tokens)
                self.commit(move)
            case Failed(_, why):
                move.state, move.why = "over", why
                self.abort(move, f"{move.request.id}#3")

    def commit(self, move: Move) -> None:
        move.state = "committing"
        self.owners[move.request.id] = (self.destination, move.new_id)
        self.destination.send(self.commit_order(move))

    def commit_order(self, move: Move) -> Commit:
        assert move.stopped is not None
        tokens = tuple(self.answers[move.request.id].tokens)
        request = replace(
            move.request, id=move.new_id, output_tokens=tokens, resume_state=move.stopped.resume_state
        )
        return Commit(move.id, request, move.stopped.computed)

    def abort(self, move: Move, request_id: str | None = None) -> None:
        """The request goes on at the source."""
        self.source.send(Abort(move.id, request_id))
        self.owners[move.request.id] = (self.source, request_id or move.request.id)
