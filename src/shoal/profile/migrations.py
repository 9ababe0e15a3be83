"""Measures how fast requests get from one engine to another of this machine: with their KV, and anew.

Two engines with the same models move a request to and fro by the orders that a server gives, over the
sockets that its engines have. Their turns are taken one after the other in one thread, and timed apart:
reading and sending KV keeps the source from its steps, receiving and writing the destination.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from statistics import median
from typing import NamedTuple

from shoal.core import ConfigError, Request, SamplingParams, derive_seed
from shoal.engine import wire
from shoal.engine.build import assemble_engine, default_threads
from shoal.engine.core import Engine
from shoal.engine.info import EngineInfo, ServiceInfo
from shoal.engine.migration import wire as migration_wire
from shoal.engine.migration.transfer import Arrived, Blocks, Transfer
from shoal.engine.migration.wire import Commit, Declined, Export, NotExported, Release, Reserve, Stopped
from shoal.engine.options import EngineOptions

MOST_PROMPT_TOKENS = 2048
"""Length of the prompt that is moved, where there is room for it."""
MOVES, REPEATS = 8, 3
"""Moves of one request, and requests: the medians count."""
_STUCK_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MigrationRates:
    """How fast requests of one service move."""

    prompt_tokens: int
    """Length of the prompt that was moved."""
    send_bytes_per_s: float
    """KV that an engine reads and sends while it does nothing else."""
    take_bytes_per_s: float
    """KV that it receives and writes."""
    prefill_tokens_per_s: float
    """Tokens that it computes anew."""

    @property
    def kv_bytes_per_s(self) -> float:
        """KV from engine to engine: two that work at once are as fast as the slower."""
        return min(self.send_bytes_per_s, self.take_bytes_per_s)


class CountingTransfer(Transfer):
    """Counts what comes and goes."""

    def __init__(self, bind: str) -> None:
        super().__init__(bind)
        self.sent_bytes = self.received_bytes = 0

    def send(self, to: str, blocks: Blocks, content: memoryview) -> None:
        """As ``Transfer`` does."""
        self.sent_bytes += content.nbytes
        super().send(to, blocks, content)

    def receive(self) -> Arrived | None:
        """As ``Transfer`` does."""
        arrived = super().receive()
        self.received_bytes += 0 if arrived is None else arrived.content.nbytes
        return arrived


class _Side:
    """One of the two engines."""

    def __init__(self, engine: Engine, bind: str) -> None:
        self.engine = engine
        self.transfer = CountingTransfer(bind)
        self.told: deque[wire.FromEngine] = deque()
        self.worked_s = 0.0
        engine.connect(self.transfer, self.told.append)

    def work(self) -> None:
        """A turn without steps, if there is anything to do; it is timed."""
        if self.engine.needs_pause:
            started = time.perf_counter()
            self.engine.begin()
            self.worked_s += time.perf_counter() - started

    def step(self) -> list[int]:
        """One step; the tokens that it made."""
        return [token for event in self.engine.step() for token in event.tokens]


class _Copied(NamedTuple):
    """What was noted of one move."""

    stopped: Stopped
    """What the source said in the end."""
    num_bytes: int
    """Of its KV."""
    send_s: float
    """How long the source worked."""
    take_s: float
    """How long the destination did."""


class MigrationProfiler:
    """Moves requests between two engines (``build_engine_pair``). folder: for their sockets."""

    def __init__(self, engines: Sequence[Engine], folder: Path) -> None:
        self._sides = [_Side(engine, f"ipc://{folder}/{number}") for number, engine in enumerate(engines)]
        self._numbers = count()

    def measure(self, service: str, info: ServiceInfo, advance: Callable[[int, int], None]) -> MigrationRates:
        """The rates of a service; ``advance`` hears how many moves are done, of how many.

        Raises ConfigError where two such requests have no room.
        """
        room = min(info.max_total_tokens, info.kv_tokens // 2) - MOVES - 2
        tokens = min(MOST_PROMPT_TOKENS, room)
        if tokens < 1:
            raise ConfigError(
                f"{service}: the KV pool holds {info.kv_tokens} tokens, too few to move a request; "
                "raise --kv-memory"
            )
        sends, takes, prefills = [], [], []
        for repeat in range(REPEATS + 1):
            moves, prefill_s = self._round(service, info, tokens)
            if repeat:  # the first warms up
                sends += [move.num_bytes / move.send_s for move in moves]
                takes += [move.num_bytes / move.take_s for move in moves]
                prefills.append(tokens / prefill_s)
            advance(repeat + 1, REPEATS + 1)
        return MigrationRates(
            prompt_tokens=tokens,
            send_bytes_per_s=median(sends),
            take_bytes_per_s=median(takes),
            prefill_tokens_per_s=median(prefills),
        )

    def _round(self, service: str, info: ServiceInfo, tokens: int) -> tuple[list[_Copied], float]:
        """Moves of one request, and the seconds that its prompt took."""
        source, target = self._sides
        number = next(self._numbers)
        request = Request(
            id=f"move-{number}-0",
            service=service,
            prompt=[derive_seed(number, position) % info.vocab_size for position in range(tokens)],
            sampling=SamplingParams(max_tokens=MOVES + 2, temperature=0.0, ignore_eos=True),
            arrival_ns=source.engine.now_ns(),
        )
        source.engine.submit(request)
        started = time.perf_counter()
        output = self._next_tokens(source)
        prefill_s = time.perf_counter() - started
        moves = []
        for move in range(MOVES):
            migration, known = f"{request.id}m", replace(request, output_tokens=tuple(output))
            copied = self._copy(source, target, migration, known)
            moved = replace(known, id=f"move-{number}-{move + 1}", resume_state=copied.stopped.resume_state)
            target.engine.migrate(Commit(migration, moved, copied.stopped.computed))
            request = replace(request, id=moved.id)
            output += self._next_tokens(target)
            source.engine.migrate(Release(migration))
            source.engine.step()
            moves.append(copied)
            source, target = target, source
        while source.engine.busy:
            source.step()
        return moves, prefill_s

    def _next_tokens(self, side: _Side) -> list[int]:
        """Those of the next step that makes any."""
        until_s = time.monotonic() + _STUCK_S
        while not (made := side.step()):
            if time.monotonic() > until_s and side.engine.idle:
                raise RuntimeError("a request does not run that was moved to measure it")
        return made

    def _copy(self, source: _Side, target: _Side, migration: str, request: Request) -> _Copied:
        """Stop a request, and copy its KV."""
        for side in (source, target):
            side.worked_s, side.transfer.sent_bytes, side.transfer.received_bytes = 0.0, 0, 0
        tokens = len(request.prompt) + request.num_output_tokens
        target.engine.migrate(Reserve(migration, request.service, tokens))
        target.engine.begin()
        source.engine.migrate(Export(migration, request.id, target.transfer.endpoint, live=False))
        stopped: Stopped | None = None
        until_s = time.monotonic() + _STUCK_S
        while stopped is None or target.transfer.received_bytes < source.transfer.sent_bytes:
            source.work()
            target.work()
            for side in (source, target):
                while side.told:
                    stopped = _heard(side.told.popleft()) or stopped
            if time.monotonic() > until_s:
                raise RuntimeError(f"KV did not get from one engine to another within {_STUCK_S:g} s")
        return _Copied(stopped, source.transfer.sent_bytes, source.worked_s, target.worked_s)

    def close(self) -> None:
        """Release sockets and engines."""
        for side in self._sides:
            side.transfer.close()
            side.engine.close()


def _heard(message: wire.FromEngine) -> Stopped | None:
    if isinstance(message, Declined | NotExported | migration_wire.Failed | wire.Refused):
        raise RuntimeError(f"a request could not be moved: {message}")
    return message if isinstance(message, Stopped) else None


def build_engine_pair(
    options: EngineOptions,
    folders: Mapping[str, Path],
    *,
    progress: Callable[[str], None] | None = None,
) -> tuple[tuple[Engine, Engine], EngineInfo]:
    """Two engines with one copy of the models, each as ``build_engine`` makes it, with half of its memory."""
    from shoal.execute.model.loading import load_models

    threads = options.threads or default_threads()
    models = load_models(
        options.services,
        folders,
        device=options.device,
        threads=threads,
        attention=options.attention,
        progress=progress,
    )
    half = replace(options, memory_share=options.memory_share / 2)
    first, info = assemble_engine(half, models, threads=threads)
    second, _ = assemble_engine(half, models, threads=threads)
    return (first, second), info
