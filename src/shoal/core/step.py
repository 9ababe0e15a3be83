"""The step contract between a scheduler and whatever executes its plans.

``schedule(now)`` commits: it allocates blocks and advances scheduled tokens. The executor runs the
plan. ``update(plan, result, now)``, called in plan order, advances computed tokens, publishes prefix
hashes and frees. Blocks named by a plan in flight are not freed, evicted, swapped or moved before
its ``update``.

A plan describes deltas on the running group that the executor remembers for each service, so that a
decode step over 256 unchanged sequences carries almost nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from shoal.core.request import FinishReason, TokenLogprobs
from shoal.core.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class NewSequence:
    """A sequence that enters the running batch of its service (again, after a preemption)."""

    seq_id: int
    """Names it in later plans; never used twice, also not after a preemption."""
    tokens: Sequence[int]
    """Every token known so far, prompt first."""
    prompt_tokens: int
    """How many of them are the prompt."""
    computed: int
    """Leading tokens whose KV is in place already (prefix hit)."""
    blocks: tuple[int, ...]
    """Its block table so far."""
    sampling: SamplingParams
    """How its tokens are sampled."""
    seed: int
    """Keys its draws, with the output position."""


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Copy the whole of one of a service's blocks onto another of its blocks."""

    service: str
    """Whose blocks they are."""
    source: int
    """The block read."""
    target: int
    """The block written."""
    source_host: bool = False
    """``source`` is a block of the host's memory (swapped KV), not of the device's pool."""
    target_host: bool = False
    """The same of ``target``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """One or more iterations of one model.

    Executed in this order: ``swap_out_copies``, ``zero``, ``copies``, then the changes of the batch
    (``left``, ``moved``, ``joined``, ``grown``), then the forward pass over ``new_tokens`` of ``seq_ids``,
    then one token sampled for each row in ``sampled``. ``left``, ``moved`` and the copies may name any
    service; all else belongs to ``service``, but for decodes of others on the same weights
    (``co_batched``). A plan without rows carries copies, or lets sequences leave.
    """

    number: int
    """Of its first iteration; every iteration counts."""
    service: str
    """Whose model runs; the rows are its own, but for the last ones of ``co_batched``."""
    seq_ids: tuple[int, ...]
    """The rows: one sequence each."""
    new_tokens: tuple[int, ...]
    """How many tokens each row computes."""
    sampled: tuple[int, ...]
    """Rows whose last known token is computed by this step, so that one is sampled."""
    iterations: int = 1
    """Most tokens that each row may get. Above 1 every row decodes and samples, and has blocks for as many.
    No row goes beyond its last token; the executor stops early after an iteration that ends a row, or when an
    arrival or a cancellation waits."""
    joined: tuple[NewSequence, ...] = ()
    """Sequences that enter the batch."""
    left: tuple[int, ...] = ()
    """Sequences to forget."""
    grown: tuple[tuple[int, tuple[int, ...]], ...] = ()
    """(sequence, further block ids) of tables that get longer."""
    swap_out_copies: tuple[BlockCopy, ...] = ()
    """Copies that save what lies in blocks about to be given up: swapping out and compaction, in order."""
    zero: tuple[int, ...] = ()
    """Merged blocks to clear."""
    copies: tuple[BlockCopy, ...] = ()
    """Copies into blocks just taken: copy on write and swapping in."""
    moved: tuple[tuple[int, tuple[int, ...]], ...] = ()
    """(sequence, its whole new block table) after a compaction."""
    co_batched: tuple[tuple[str, int], ...] = ()
    """(service, number of rows) of others on the same weights, whose rows follow in this order. They decode
    and sample; their blocks have the same shape and stride, so that one view of the memory serves all."""

    def rows_by_service(self) -> list[tuple[str, slice]]:
        """Which rows are whose: those of ``service`` first."""
        first = len(self.seq_ids) - sum([count for _, count in self.co_batched])
        rows = [(self.service, slice(0, first))]
        for service, count in self.co_batched:
            rows.append((service, slice(first, first + count)))
            first += count
        return rows


@dataclass(frozen=True, slots=True)
class StepTimings:
    """Where an executor spent a step, in nanoseconds."""

    prepare_ns: int = 0
    forward_ns: int = 0
    sample_ns: int = 0


NO_TOKEN = -1
"""Stands in a result for a token that could not be sampled; see ``StepResult.failures`` and ``postponed``."""


class Failure(NamedTuple):
    """Why a row has NO_TOKEN."""

    why: str
    """What the client is told."""
    finish: FinishReason = FinishReason.ERROR
    """How its request ends: INVALID where what it asks for is the reason."""


ANONYMOUS_TOKEN = -2
"""Stands in a result for a token of which only the time is known (simulation): it ends no output."""


class PromptLogprobs(NamedTuple):
    """Log-probabilities of successive tokens of one prompt."""

    first: int
    """The place of the first of them in the prompt, at least 1: nothing comes before the first token."""
    entries: Sequence[TokenLogprobs]
    """Of each."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a plan produced: at least one token for each entry of ``plan.sampled``, in that order."""

    tokens: Sequence[Sequence[int]]
    """Tokens [n][sampled]: the first of every row, then the second, ...; NO_TOKEN where none could be
    sampled. n is the number of iterations done, unless ``counts`` says otherwise; at least 1, at most
    ``plan.iterations``."""
    durations_ns: Sequence[int]
    """Of each iteration done."""
    counts: Sequence[int] | None = None
    """How many of its column's tokens each row has, at most ``plan.iterations``; None: all. An executor that
    makes several tokens of a row in one iteration (speculation) says it here."""
    logprobs: Sequence[Sequence[TokenLogprobs | None]] | None = None
    """Of each token (None where the request wants none); or None."""
    timings: StepTimings = field(default_factory=StepTimings)
    """Where the time went."""
    prompt_logprobs: Mapping[int, PromptLogprobs] = field(default_factory=dict)
    """By row: of the prompt tokens that follow those it has computed, where the request wants them. Tokens
    computed again after a preemption come again."""
    embeddings: Mapping[int, bytes] = field(default_factory=dict)
    """By row: the prompt's embedding, with the first token of a request that wants it."""
    failures: Mapping[int, Failure] = field(default_factory=dict)
    """Why a row has NO_TOKEN, by its place in ``plan.sampled``; of others, its logits were not finite."""
    postponed: frozenset[int] = frozenset()
    """Rows, by their place in ``plan.sampled``, that have NO_TOKEN in the last iteration because it is not
    known yet which token may come next. Such a row has computed all but its last token, and goes on when the
    executor says that it is ready."""

    @classmethod
    def of_step(
        cls,
        tokens: Sequence[int],
        duration_ns: int,
        logprobs: Sequence[TokenLogprobs | None] | None = None,
        timings: StepTimings | None = None,
    ) -> "StepResult":
        """Of one iteration: one token for each row that samples."""
        return cls(
            [tokens],
            [duration_ns],
            None,
            None if logprobs is None else [logprobs],
            StepTimings() if timings is None else timings,
        )

    @property
    def duration_ns(self) -> int:
        """Of all iterations."""
        return sum(self.durations_ns)


@dataclass(frozen=True, slots=True)
class Idle:
    """Nothing to do now; ask again at ``until_ns`` although no event came (None: only on events)."""

    until_ns: int | None = None
