"""The step contract between a scheduler and whatever executes its plans.

``schedule(now)`` commits: it allocates blocks and advances scheduled tokens. The executor runs the
plan. ``update(plan, result, now)``, called in plan order, advances computed tokens, publishes prefix
hashes and frees. Blocks named by a plan in flight are not freed, evicted, swapped or moved before
its ``update``.

A plan describes deltas on the running group that the executor remembers for each service, so that a
decode step over 256 unchanged sequences carries almost nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from shoal.core.request import TokenLogprobs
from shoal.core.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class Joined:
    """A sequence that enters the running group of its service (again, after an eviction).

    sequence: number that names it in later plans; never used twice, also not after an eviction.
    tokens: every token known so far, prompt first. prompt_tokens: how many of them are the prompt.
    computed: leading tokens whose KV is in place already (prefix hit). blocks: its block table so
    far. seed: keys its draws, with the output position.
    """

    sequence: int
    tokens: Sequence[int]
    prompt_tokens: int
    computed: int
    blocks: tuple[int, ...]
    sampling: SamplingParams
    seed: int


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Copy the whole of one of a service's blocks onto another of its blocks.

    source_host, target_host: the number is of the host's memory (swapped KV), not of the device's pool.
    """

    service: str
    source: int
    target: int
    source_host: bool = False
    target_host: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """One iteration of one service's model.

    Executed in this order: ``vacate`` (copies that save what lies in blocks about to be given up: swapping
    out and compaction, one after the other), ``zero`` merged blocks (ids), ``copies`` (into blocks just
    taken: copy on write and swapping in), then group changes (``left``; ``moved``: (sequence, its whole new
    block table) after a compaction; ``joined``; ``grown``: (sequence, further block ids)), then the forward
    pass over ``new_tokens[i]`` tokens of ``sequences[i]``, then one token sampled for each index in
    ``sampled`` (rows whose last known token is computed by this step). ``left``, ``moved`` and the copies
    may name any service; ``joined``, ``grown`` and ``sequences`` belong to ``service``.
    """

    number: int
    service: str
    sequences: tuple[int, ...]
    new_tokens: tuple[int, ...]
    sampled: tuple[int, ...]
    joined: tuple[Joined, ...] = ()
    left: tuple[int, ...] = ()
    grown: tuple[tuple[int, tuple[int, ...]], ...] = ()
    vacate: tuple[BlockCopy, ...] = ()
    zero: tuple[int, ...] = ()
    copies: tuple[BlockCopy, ...] = ()
    moved: tuple[tuple[int, tuple[int, ...]], ...] = ()


@dataclass(frozen=True, slots=True)
class StepTimings:
    """Where an executor spent a step, in nanoseconds."""

    prepare_ns: int = 0
    forward_ns: int = 0
    sample_ns: int = 0


NO_TOKEN = -1
"""Stands in a result for a token that could not be sampled: the model's logits were not finite."""

ANONYMOUS_TOKEN = -2
"""Stands in a result for a token of which only the time is known (simulation): it ends no output."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a plan produced: at least one token for each entry of ``plan.sampled``, in that order."""

    tokens: Sequence[Sequence[int]]
    """Tokens [n][sampled]: the first of every row, then the second, ...; NO_TOKEN where none could be sampled.
    n is the number of iterations done, unless ``counts`` says otherwise; at least 1, at most
    ``plan.iterations``."""
    durations_ns: Sequence[int]
    """Of each iteration done."""
    counts: Sequence[int] | None = None
    """How many of its column's tokens each row has; None: all. An executor that makes several tokens of a row in
    one iteration (speculation) says it here."""
    logprobs: Sequence[Sequence[TokenLogprobs | None]] | None = None
    """Of each token (None where the request wants none); or None."""
    timings: StepTimings = field(default_factory=StepTimings)
    """Where the time went."""

    @property
    def duration_ns(self) -> int:
        """Of all iterations."""
        return sum(self.durations_ns)


@dataclass(frozen=True, slots=True)
class Idle:
    """Nothing to do now; ask again at ``until_ns`` although no event came (None: only on events)."""

    until_ns: int | None = None
