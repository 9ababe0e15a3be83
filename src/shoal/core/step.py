"""The step contract between scheduler and executor: StepPlan, StepResult, block copies.

``schedule(now)`` commits: it allocates blocks and advances scheduled tokens. The executor runs the
plan. ``update(plan, result, now)``, called in plan order, advances computed tokens, publishes prefix
hashes and frees blocks. Blocks named by a plan in flight are not freed, evicted, swapped or moved before
its ``update``.

A plan contains changes to the running batch that the executor keeps for each service, so that a decode
step over 256 unchanged sequences carries almost no data.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from shoal.core.request import FinishReason, TokenLogprobs
from shoal.core.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class NewSequence:
    """A sequence that enters the running batch of its service, for the first time or after a preemption."""

    seq_id: int
    """Identifies it in later plans; never reused, not even after a preemption."""
    tokens: Sequence[int]
    """All known tokens, prompt first."""
    prompt_tokens: int
    """Length of the prompt."""
    computed: int
    """Leading tokens whose KV is in place already (prefix cache hit, swapped or migrated KV)."""
    blocks: tuple[int, ...]
    """Its block table."""
    sampling: SamplingParams
    seed: int
    """Key of its random draws, together with the output position."""


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Copy one block of a service to another of its blocks."""

    service: str
    source: int
    target: int
    source_host: bool = False
    """``source`` is in the host's pool (swapped KV), not in the device's."""
    target_host: bool = False
    """``target`` is in the host's pool."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """One or more iterations of one model.

    Executed in this order: ``evict``, ``fetch``, ``swap_out_copies``, ``zero``, ``copies``, then the changes
    of the batch (``left``, ``moved``, ``joined``, ``grown``), then the forward pass over ``new_tokens`` of
    ``seq_ids``, then one token is sampled for each row in ``sampled``. ``left``, ``moved`` and the copies may
    name any service; everything else belongs to ``service``, except decodes of other services on the same
    weights (``co_batched``). A plan without rows only carries weights, copies or changes of the batch.
    """

    number: int
    """Number of its first iteration; iterations are counted one by one."""
    service: str
    """Owner of the model and of the rows, except the last rows of ``co_batched``."""
    seq_ids: tuple[int, ...]
    """The rows: one sequence each."""
    new_tokens: tuple[int, ...]
    """Tokens that each row computes."""
    sampled: tuple[int, ...]
    """Rows whose last known token is computed by this step, so that the next one is sampled."""
    iterations: int = 1
    """Limit on the new tokens of each row. Above 1, every row decodes and samples, and has enough blocks.
    No row goes beyond its last token; the executor stops early after an iteration that ends a row, or when an
    arrival or a cancellation is pending."""
    joined: tuple[NewSequence, ...] = ()
    """Sequences that enter the batch."""
    left: tuple[int, ...] = ()
    """Sequences that leave the batch."""
    grown: tuple[tuple[int, tuple[int, ...]], ...] = ()
    """(sequence, block ids) appended to block tables."""
    swap_out_copies: tuple[BlockCopy, ...] = ()
    """Copies out of blocks that are being freed (swap-out, compaction), in order."""
    zero: tuple[int, ...] = ()
    """Merged blocks to clear."""
    copies: tuple[BlockCopy, ...] = ()
    """Copies into newly allocated blocks (copy-on-write, swap-in)."""
    moved: tuple[tuple[int, tuple[int, ...]], ...] = ()
    """(sequence, its whole new block table) after a compaction."""
    co_batched: tuple[tuple[str, int], ...] = ()
    """(service, number of rows) of other services on the same weights, whose rows follow in this order. They
    decode and sample; their blocks have the same shape and stride, so that one view of the memory serves
    all."""
    evict: tuple[str, ...] = ()
    """Weights that leave the device's memory; no plan in flight has rows of their services."""
    fetch: tuple[str, ...] = ()
    """Weights that begin to come, behind those that are coming; steps of other weights go on meanwhile, and
    the executor reports an ``Arrival`` for each."""

    def rows_by_service(self) -> list[tuple[str, slice]]:
        """(service, its rows), starting with ``service``."""
        first = len(self.seq_ids) - sum([count for _, count in self.co_batched])
        rows = [(self.service, slice(0, first))]
        for service, count in self.co_batched:
            rows.append((service, slice(first, first + count)))
            first += count
        return rows


class Arrival(NamedTuple):
    """Weights that a plan fetched are in place, or could not be fetched."""

    weights: str
    seconds: float
    """From the begin of the copy."""
    error: str | None = None
    """Why they are not in place."""


@dataclass(frozen=True, slots=True)
class StepTimings:
    """Time that an executor spent in the phases of a step."""

    prepare_ns: int = 0
    forward_ns: int = 0
    sample_ns: int = 0

    @classmethod
    def total(cls, timings: Sequence["StepTimings"]) -> "StepTimings":
        return cls(
            sum([each.prepare_ns for each in timings]),
            sum([each.forward_ns for each in timings]),
            sum([each.sample_ns for each in timings]),
        )


NO_TOKEN = -1
"""Placeholder for a token that could not be sampled; see ``StepResult.failures`` and ``postponed``."""


class Failure(NamedTuple):
    """The reason for NO_TOKEN in a row."""

    why: str
    """Error message for the client."""
    finish: FinishReason = FinishReason.ERROR
    """INVALID if the request itself is the reason."""


ANONYMOUS_TOKEN = -2
"""Placeholder in a result for a simulated token, of which only the time is known; it ends no output."""


class PromptLogprobs(NamedTuple):
    """Log-probabilities of successive tokens of one prompt."""

    first: int
    """Position of the first of them in the prompt, at least 1: the first token has no log-probability."""
    entries: Sequence[TokenLogprobs]


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of a plan: at least one token for each entry of ``plan.sampled``, in that order."""

    tokens: Sequence[Sequence[int]]
    """Tokens [n][sampled]: the first token of every row, then the second, ...; NO_TOKEN where sampling
    failed. n is the number of completed iterations, unless ``counts`` says otherwise; 1 to
    ``plan.iterations``."""
    durations_ns: Sequence[int]
    """Of each completed iteration."""
    counts: Sequence[int] | None = None
    """Number of tokens of each row, at most ``plan.iterations``; None: all of its column. Set by an executor
    that makes several tokens of a row in one iteration (speculative decoding)."""
    logprobs: Sequence[Sequence[TokenLogprobs | None]] | None = None
    """As ``tokens``, with None for requests without log-probabilities; None if no request wants them."""
    timings: StepTimings = field(default_factory=StepTimings)
    prompt_logprobs: Mapping[int, PromptLogprobs] = field(default_factory=dict)
    """By row: for the prompt tokens behind those that it has computed, if the request wants them. Tokens
    computed again after a preemption are reported again."""
    embeddings: Mapping[int, bytes] = field(default_factory=dict)
    """By row: the prompt's embedding, with the first token of a request that wants it."""
    failures: Mapping[int, Failure] = field(default_factory=dict)
    """By index in ``plan.sampled``: the reason for NO_TOKEN; without an entry, the logits were not finite."""
    postponed: frozenset[int] = frozenset()
    """Indices in ``plan.sampled`` of rows with NO_TOKEN in the last iteration, because the set of allowed
    tokens (grammar) is not known yet. Such a row has computed all but its last token, and continues when
    the executor reports it as ready."""

    @classmethod
    def of_step(
        cls,
        tokens: Sequence[int],
        duration_ns: int,
        logprobs: Sequence[TokenLogprobs | None] | None = None,
        timings: StepTimings | None = None,
    ) -> "StepResult":
        """The result of one iteration: one token for each row that samples."""
        return cls(
            [tokens],
            [duration_ns],
            None,
            None if logprobs is None else [logprobs],
            StepTimings() if timings is None else timings,
        )

    @classmethod
    def of_iterations(cls, results: Sequence["StepResult"]) -> "StepResult":
        """The result of a plan from those of its iterations, of which the first alone has prompt tokens."""
        first, last = results[0], results[-1]
        if first is last:
            return first
        missing = [[None] * len(first.tokens[0])]
        logprobs = [row for result in results for row in result.logprobs or missing]
        return cls(
            [tokens for result in results for tokens in result.tokens],
            [duration_ns for result in results for duration_ns in result.durations_ns],
            logprobs=None if all(result.logprobs is None for result in results) else logprobs,
            timings=StepTimings.total([result.timings for result in results]),
            prompt_logprobs=first.prompt_logprobs,
            embeddings=first.embeddings,
            failures=last.failures,
            postponed=last.postponed,
        )

    @property
    def duration_ns(self) -> int:
        """Total of all iterations."""
        return sum(self.durations_ns)


@dataclass(frozen=True, slots=True)
class Idle:
    """Nothing to do now; schedule again at ``until_ns`` or at the next event (None: only at an event)."""

    until_ns: int | None = None
