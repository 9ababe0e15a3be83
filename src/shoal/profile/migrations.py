"""Measures rates of migrations between two engines on this machine: KV sent and received, and recomputation.

Two engines with the same models migrate a request back and forth, with the commands and sockets of a server.
They work in turns in one thread, and are timed separately: reading and sending KV delays steps of the source,
receiving and writing it delays those of the destination.
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

MAX_PROMPT_TOKENS = 2048
"""Length of the migrated prompt, if the pool has room for it."""
MIGRATIONS, REPEATS = 8, 3
"""Migrations of one request, and requests; the rates are medians."""
_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MigrationRates:
    """Migration rates of one service."""

    prompt_tokens: int
    """Length of the migrated prompt."""
    send_bytes_per_s: float
    """Rate of reading and sending KV."""
    take_bytes_per_s: float
    """Rate of receiving and writing KV."""
    prefill_tokens_per_s: float
    """Rate of recomputation instead."""

    @property
    def kv_bytes_per_s(self) -> float:
        """Rate of a migration in which both engines work at once: that of the slower side."""
        return min(self.send_bytes_per_s, self.take_bytes_per_s)


class CountingTransfer(Transfer):
    """Counts sent and received bytes."""

    def __init__(self, bind: str) -> None:
        super().__init__(bind)
        self.sent_bytes = self.received_bytes = 0

    def send(self, to: str, blocks: Blocks, content: memoryview) -> None:
        """See Transfer."""
        self.sent_bytes += content.nbytes
        super().send(to, blocks, content)

    def receive(self) -> Arrived | None:
        """See Transfer."""
        arrived = super().receive()
        self.received_bytes += 0 if arrived is None else arrived.content.nbytes
        return arrived


class _Side:
    """One of the two engines."""

    def __init__(self, engine: Engine, bind: str) -> None:
        self.engine = engine
        self.transfer = CountingTransfer(bind)
        self.replies: deque[wire.FromEngine] = deque()
        self.worked_s = 0.0
        engine.connect(self.transfer, self.replies.append)

    def work(self) -> None:
        """Work on migrations, if there is anything to do; it is timed."""
        if self.engine.needs_pause:
            started = time.perf_counter()
            self.engine.begin()
            self.worked_s += time.perf_counter() - started

    def step(self) -> list[int]:
        """Run one step; returns its output tokens."""
        return [token for event in self.engine.step() for token in event.tokens]


class _Measurement(NamedTuple):
    """Measurements of one migration."""

    stopped: Stopped
    num_bytes: int
    """Size of the KV."""
    send_s: float
    """Time that the source worked."""
    take_s: float
    """Time that the destination worked."""


class MigrationProfiler:
    """Migrates requests between two engines (``build_engine_pair``). folder: for their sockets."""

    def __init__(self, engines: Sequence[Engine], folder: Path) -> None:
        self._sides = [_Side(engine, f"ipc://{folder}/{number}") for number, engine in enumerate(engines)]
        self._numbers = count()

    def measure(self, service: str, info: ServiceInfo, advance: Callable[[int, int], None]) -> MigrationRates:
        """Measure a service. advance: called with the numbers of finished and of all requests.

        Raises ConfigError if the pool is too small for two such requests.
        """
        room = min(info.max_total_tokens, info.kv_tokens // 2) - MIGRATIONS - 2
        tokens = min(MAX_PROMPT_TOKENS, room)
        if tokens < 1:
            raise ConfigError(
                f"{service}: the KV pool holds {info.kv_tokens} tokens, too few to move a request; "
                "raise --kv-memory"
            )
        sends, takes, prefills = [], [], []
        for repeat in range(REPEATS + 1):
            measurements, prefill_s = self._round(service, info, tokens)
            if repeat:  # the first warms up
                sends += [each.num_bytes / each.send_s for each in measurements]
                takes += [each.num_bytes / each.take_s for each in measurements]
                prefills.append(tokens / prefill_s)
            advance(repeat + 1, REPEATS + 1)
        return MigrationRates(
            prompt_tokens=tokens,
            send_bytes_per_s=median(sends),
            take_bytes_per_s=median(takes),
            prefill_tokens_per_s=median(prefills),
        )

    def _round(self, service: str, info: ServiceInfo, tokens: int) -> tuple[list[_Measurement], float]:
        """Migrate one request; returns its measurements, and the seconds of its prefill."""
        source, target = self._sides
        number = next(self._numbers)
        request = Request(
            id=f"move-{number}-0",
            service=service,
            prompt=[derive_seed(number, position) % info.vocab_size for position in range(tokens)],
            sampling=SamplingParams(max_tokens=MIGRATIONS + 2, temperature=0.0, ignore_eos=True),
            arrival_ns=source.engine.now_ns(),
        )
        source.engine.submit(request)
        started = time.perf_counter()
        output = self._next_tokens(source)
        prefill_s = time.perf_counter() - started
        measurements = []
        for index in range(MIGRATIONS):
            migration, known = f"{request.id}m", replace(request, output_tokens=tuple(output))
            measured = self._transfer_kv(source, target, migration, known)
            committed = replace(
                known, id=f"move-{number}-{index + 1}", resume_state=measured.stopped.resume_state
            )
            target.engine.migrate(Commit(migration, committed, measured.stopped.computed))
            request = replace(request, id=committed.id)
            output += self._next_tokens(target)
            source.engine.migrate(Release(migration))
            source.engine.step()
            measurements.append(measured)
            source, target = target, source
        while source.engine.busy:
            source.step()
        return measurements, prefill_s

    def _next_tokens(self, side: _Side) -> list[int]:
        """Step until there are output tokens, and return them."""
        until_s = time.monotonic() + _TIMEOUT_S
        while not (tokens := side.step()):
            if time.monotonic() > until_s and side.engine.idle:
                raise RuntimeError("a migrated request does not run")
        return tokens

    def _transfer_kv(self, source: _Side, target: _Side, migration: str, request: Request) -> _Measurement:
        """Stop a request, and transfer its KV."""
        for side in (source, target):
            side.worked_s, side.transfer.sent_bytes, side.transfer.received_bytes = 0.0, 0, 0
        tokens = len(request.prompt) + request.num_output_tokens
        target.engine.migrate(Reserve(migration, request.service, tokens))
        target.engine.begin()
        source.engine.migrate(Export(migration, request.id, target.transfer.endpoint, live=False))
        stopped: Stopped | None = None
        until_s = time.monotonic() + _TIMEOUT_S
        while stopped is None or target.transfer.received_bytes < source.transfer.sent_bytes:
            source.work()
            target.work()
            for side in (source, target):
                while side.replies:
                    stopped = _check_reply(side.replies.popleft()) or stopped
            if time.monotonic() > until_s:
                raise RuntimeError(f"KV was not transferred between two engines within {_TIMEOUT_S:g} s")
        return _Measurement(stopped, source.transfer.sent_bytes, source.worked_s, target.worked_s)

    def close(self) -> None:
        """Close sockets and engines."""
        for side in self._sides:
            side.transfer.close()
            side.engine.close()


def _check_reply(message: wire.FromEngine) -> Stopped | None:
    if isinstance(message, Declined | NotExported | migration_wire.Failed | wire.Refused):
        raise RuntimeError(f"a request could not be migrated: {message}")
    return message if isinstance(message, Stopped) else None


def build_engine_pair(
    options: EngineOptions,
    folders: Mapping[str, Path],
    *,
    progress: Callable[[str], None] | None = None,
) -> tuple[tuple[Engine, Engine], EngineInfo]:
    """Two engines as of ``build_engine``, which share the models, and have half of the memory each."""
    from shoal.execute.model.model_set import load_models

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
