"""A bounded sample of the steps of a running engine, from which step times are fitted while it serves."""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from shoal.core import StepPlan, StepResult
from shoal.forecast import StepRows

_KEPT = 24
"""Samples per size of step; the oldest leave first."""
_STRIDE = 16
"""Of the steps of a size that has all its samples, one in this many is kept."""


class StepSample(NamedTuple):
    """One step as it ran."""

    decodes: int
    """As in ``StepRows``, like the next three."""
    decode_context: int
    chunks: tuple[tuple[int, int], ...]
    sampled: int
    seconds: float

    @property
    def rows(self) -> StepRows:
        return StepRows(self.decodes, self.decode_context, self.chunks, self.sampled)


class ComputedTokens(Protocol):
    """What a sample needs of the scheduler."""

    def computed_before(self, plan: StepPlan) -> Sequence[int] | None:
        """See ``Scheduler``."""


class _Steps:
    """Samples of one service, by whether a step has prompt chunks, and its size in powers of two.

    Decodes are much more frequent than prompts, and batches of a usual size than others: each size has
    samples of its own, so that a fit sees all of them.
    """

    def __init__(self) -> None:
        self._sizes: dict[tuple[bool, int], deque[StepSample]] = {}
        self._passed: dict[tuple[bool, int], int] = {}

    def is_due(self, size: tuple[bool, int]) -> bool:
        """Count a step, and return whether it is to be kept.

        The first of a size is not, as it may compile kernels.
        """
        passed = self._passed.get(size, -1) + 1
        self._passed[size] = passed
        return 0 < passed <= _KEPT or passed % _STRIDE == 1

    def keep(self, size: tuple[bool, int], sample: StepSample) -> None:
        kept = self._sizes.get(size)
        if kept is None:
            kept = self._sizes[size] = deque(maxlen=_KEPT)
        kept.append(sample)

    @property
    def all(self) -> list[StepSample]:
        return [sample for size in sorted(self._sizes) for sample in self._sizes[size]]


class StepSamples:
    """Samples of the steps of each service. scheduler: knows how many tokens were computed before."""

    def __init__(self, scheduler: ComputedTokens) -> None:
        self._scheduler = scheduler
        self._services: dict[str, _Steps] = {}

    def add(self, plan: StepPlan, result: StepResult, since_last_ns: int) -> None:
        """Count a step before its update; it is kept if one of its size is due.

        since_last_ns: from the end of the last step, with scheduling, output and messages; 0: the engine was
        idle in between, so the duration of the step alone counts.

        Steps that move weights or KV are left out, and those in which a row has several tokens (speculation)
        or more output than one (log-probabilities of its prompt, an embedding).
        """
        if not plan.seq_ids or plan.fetch or plan.evict or plan.swap_out_copies or plan.copies:
            return
        if result.counts is not None or result.prompt_logprobs or result.embeddings:
            return
        steps = self._services.get(plan.service)
        if steps is None:
            steps = self._services[plan.service] = _Steps()
        tokens = sum(plan.new_tokens)
        size = tokens > len(plan.seq_ids), tokens.bit_length()
        if not steps.is_due(size):
            return
        computed = self._scheduler.computed_before(plan)
        if computed is not None:
            steps.keep(size, _sample(plan, result, computed, max(since_last_ns, result.duration_ns)))

    @property
    def services(self) -> dict[str, list[StepSample]]:
        """The samples by service."""
        return {name: steps.all for name, steps in self._services.items()}

    def forget(self, service: str) -> None:
        """Drop the samples of a service that was removed: another of its name may follow."""
        self._services.pop(service, None)


def _sample(plan: StepPlan, result: StepResult, computed: Sequence[int], took_ns: int) -> StepSample:
    """Of several iterations the mean, which is that of the mean context."""
    steps = len(result.durations_ns)
    context = decodes = 0
    chunks = []
    for count, before in zip(plan.new_tokens, computed, strict=True):
        if count == 1:
            decodes += 1
            context += before + 1
        else:
            chunks.append((count, before))
    context += decodes * (steps - 1) // 2
    return StepSample(decodes, context, tuple(chunks), len(plan.sampled), took_ns / steps / 1e9)
