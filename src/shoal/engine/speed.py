"""Measures the prefill and decode speed of a loaded service, with short prompts and a few output tokens.

The plans bypass the scheduler, so nothing is counted, learned or cached. Speeds of weights that come and go
are kept with their image, since at a start none of them are in memory.
"""

import contextlib
import json
import os
import time
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import NamedTuple

from shoal.core import NewSequence, SamplingParams, StepPlan, StepResult
from shoal.execute.protocol import Executor, StepFailed, WeightsAbsent
from shoal.kvcache.pool import BlockPool

# The short request is also the warm-up; the long one is run only where it is quick.
_SHORT_PROMPT = 16
_LONG_PROMPT = 80
_LONG_OUTPUT = 4
_MAX_LONG_S = 0.2
_POLL_S = 0.002

# The scheduler counts from 0 and never gets to these ids.
_sequence_ids = count(2**61)


class Speed(NamedTuple):
    """Speed of one service, for a request that runs alone."""

    prefill_s: float
    """Seconds per prompt token."""
    decode_s: float
    """Seconds per output token."""


def measure_speed(
    executor: Executor,
    pool: BlockPool,
    service: str,
    max_total_tokens: int,
    vocab_size: int,
    *,
    compiles: bool,
) -> Speed | None:
    """Run a few requests directly on the executor, while the engine has no plans in flight.

    max_total_tokens: maximum length of a request. compiles: the first steps also compile kernels, and
    are not timed. Returns None where steps fail, weights are absent, or the pool has no space.
    """
    long = max_total_tokens >= _LONG_PROMPT + _LONG_OUTPUT
    tokens = _LONG_PROMPT + _LONG_OUTPUT if long else min(_SHORT_PROMPT + 1, max_total_tokens)
    if tokens < 2 or (blocks := pool.allocate(service, -(-tokens // pool.block_size))) is None:
        return None
    try:
        run = _SpeedRun(executor, service, blocks, vocab_size)
        run.step(zero=pool.take_dirty())
        short = min(_SHORT_PROMPT, tokens - 1)
        if compiles:
            run.request(short, 1)
        speed = run.request(short, 1)
        if long and _LONG_PROMPT * speed.prefill_s + _LONG_OUTPUT * speed.decode_s <= _MAX_LONG_S:
            speed = run.request(_LONG_PROMPT, _LONG_OUTPUT - 1)
        return speed
    except (StepFailed, WeightsAbsent):
        return None
    finally:
        pool.free(service, blocks)


def measure_absent(
    executor: Executor, pool: BlockPool, service: str, weights: str, max_total_tokens: int, vocab_size: int
) -> Speed | None:
    """Fetch a service's weights, measure its speed on a CPU, and evict them.

    weights: their name. Returns None where ``measure_speed`` does, or if they cannot be fetched.
    """
    _move_weights(executor, service, fetch=(weights,))
    while not (arrivals := executor.arrivals()):
        time.sleep(_POLL_S)
    if arrivals[0].error is not None:
        return None
    try:
        return measure_speed(executor, pool, service, max_total_tokens, vocab_size, compiles=False)
    finally:
        _move_weights(executor, service, evict=(weights,))


def _move_weights(
    executor: Executor, service: str, *, fetch: tuple[str, ...] = (), evict: tuple[str, ...] = ()
) -> None:
    executor.submit(
        StepPlan(number=0, service=service, seq_ids=(), new_tokens=(), sampled=(), fetch=fetch, evict=evict)
    )
    executor.collect()


class KeptSpeeds:
    """Speeds in a file, by the settings with which they were measured; a file that cannot be used is
    ignored."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def find(self, settings: str) -> Speed | None:
        """The speed with these settings; None if it was not measured yet."""
        found = self._read().get(settings)
        return None if found is None else Speed(*found)

    def keep(self, settings: str, speed: Speed) -> None:
        speeds = self._read() | {settings: list(speed)}
        partial = self._file.with_suffix(f".{os.getpid()}")
        with contextlib.suppress(OSError):
            partial.write_text(json.dumps(speeds))
            partial.replace(self._file)

    def _read(self) -> dict[str, list[float]]:
        try:
            speeds: dict[str, list[float]] = json.loads(self._file.read_text())
            return speeds
        except (OSError, ValueError):
            return {}


class _SpeedRun:
    """Runs requests of one service, one after another, in the same blocks."""

    def __init__(self, executor: Executor, service: str, blocks: Sequence[int], vocab_size: int) -> None:
        self._executor = executor
        self._service = service
        self._blocks = tuple(blocks)
        self._vocab_size = vocab_size

    def request(self, prompt_tokens: int, decodes: int) -> Speed:
        """Time a prompt, and ``decodes`` output tokens after the first."""
        sequence = next(_sequence_ids)
        joined = NewSequence(
            seq_id=sequence,
            tokens=[position % self._vocab_size for position in range(prompt_tokens)],
            prompt_tokens=prompt_tokens,
            computed=0,
            blocks=self._blocks,
            sampling=SamplingParams(temperature=0.0, max_tokens=1 + decodes, ignore_eos=True),
            seed=0,
        )
        try:
            prefill_s, _ = self.step((sequence,), (prompt_tokens,), joined=(joined,))
            decode_s, result = self.step((sequence,), (1,), iterations=decodes)
        finally:
            self.step(left=(sequence,))
        return Speed(prefill_s / prompt_tokens, decode_s / len(result.tokens))

    def step(
        self,
        sequences: tuple[int, ...] = (),
        new_tokens: tuple[int, ...] = (),
        *,
        iterations: int = 1,
        joined: tuple[NewSequence, ...] = (),
        left: tuple[int, ...] = (),
        zero: tuple[int, ...] = (),
    ) -> tuple[float, StepResult]:
        """Run one plan; returns its seconds and its result."""
        plan = StepPlan(
            number=0,
            service=self._service,
            seq_ids=sequences,
            new_tokens=new_tokens,
            sampled=tuple(range(len(sequences))),
            iterations=iterations,
            joined=joined,
            left=left,
            zero=zero,
        )
        started = time.perf_counter()
        self._executor.submit(plan)
        result = self._executor.collect()
        return time.perf_counter() - started, result
