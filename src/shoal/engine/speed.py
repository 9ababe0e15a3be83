"""How fast an engine computes a service, measured with short prompts and a few tokens of output.

The plans are made here, and go to the executor past the scheduler: nothing is counted, learned or cached.
"""

import time
from collections.abc import Sequence
from itertools import count
from typing import NamedTuple

from shoal.core import NewSequence, SamplingParams, StepPlan, StepResult
from shoal.execute.protocol import Executor, StepFailed
from shoal.kvcache.pool import BlockPool

# The short request is also the warm-up; the long one is run only where it is quick.
_SHORT_PROMPT = 16
_LONG_PROMPT = 80
_LONG_OUTPUT = 4
_LONGEST_S = 0.2

# Sequences of the scheduler count from 0; no engine lives long enough to meet these.
_sequences = count(2**61)


class Speed(NamedTuple):
    """Of one service, for a request that runs alone."""

    prefill_s: float
    """Seconds for each token of a prompt."""
    decode_s: float
    """Seconds for each token of output."""


def measure_speed(
    executor: Executor, pool: BlockPool, service: str, most_tokens: int, vocab_size: int, *, compiles: bool
) -> Speed | None:
    """Run a few requests past the scheduler, which must have no plans in flight.

    most_tokens: of one request of the service. compiles: the first steps compile kernels, which takes longer
    than they do. Returns None where steps fail, or there is no room.
    """
    long = most_tokens >= _LONG_PROMPT + _LONG_OUTPUT
    tokens = _LONG_PROMPT + _LONG_OUTPUT if long else min(_SHORT_PROMPT + 1, most_tokens)
    if tokens < 2 or (blocks := pool.allocate(service, -(-tokens // pool.block_size))) is None:
        return None
    try:
        run = _Run(executor, service, blocks, vocab_size)
        run.step(zero=pool.take_dirty())
        short = min(_SHORT_PROMPT, tokens - 1)
        if compiles:
            run.request(short, 1)
        speed = run.request(short, 1)
        if long and _LONG_PROMPT * speed.prefill_s + _LONG_OUTPUT * speed.decode_s <= _LONGEST_S:
            speed = run.request(_LONG_PROMPT, _LONG_OUTPUT - 1)
        return speed
    except StepFailed:
        return None
    finally:
        pool.free(service, blocks)


class _Run:
    """Requests of one service, one after the other, in the same blocks."""

    def __init__(self, executor: Executor, service: str, blocks: Sequence[int], vocab_size: int) -> None:
        self._executor = executor
        self._service = service
        self._blocks = tuple(blocks)
        self._vocab_size = vocab_size

    def request(self, prompt_tokens: int, decodes: int) -> Speed:
        """Compute a prompt, and as many tokens of output after the first."""
        sequence = next(_sequences)
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
        """One plan: its seconds, and what it produced."""
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
