"""One unfinished request: what is not counted at every step, and all of it while the request waits."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from shoal.core import NO_GOALS, SLO, FinishReason, Prompt, Request, SyntheticPrompt, derive_seed
from shoal.kvcache import hash_blocks, hash_next, hash_salt, hash_synthetic


@dataclass(slots=True, eq=False)
class RequestState:
    """The state of one unfinished request. Only the scheduler writes it.

    While the request runs, its progress is a row of the service's ``RunningBatch``, and the fields marked
    *progress* here are out of date: they are written once, when the row is removed.
    """

    request: Request
    """As submitted, with its arrival on the scheduler's clock."""
    service: str
    """The service that it asks."""
    number: int
    """Its place in the order of submission."""
    max_new_tokens: int
    """Most output tokens that it may have."""
    stop_token_ids: frozenset[int]
    """Tokens that end it."""
    num_prompt_tokens: int
    """Length of the prompt."""
    num_final_tokens: int
    """Prompt and output tokens at its end: the true ones if they are known, else the most. For the oracle."""
    forecast_seed: int
    """Keys the draws of its output length: 64 bits, as a signed number."""
    token_ids: list[int]
    """Prompt and output; empty for a synthetic prompt, of which only lengths are known."""
    block_hashes: list[bytes]
    """Hashes of its leading full blocks, as far as anybody asked for them."""
    choices: list["RequestState"] = field(default_factory=list)
    """Unfinished requests of its call that have this prompt, itself included; empty where it was alone."""
    choice_answered: bool = False
    """Whether a choice of its call has ended with tokens."""
    slo: SLO = NO_GOALS
    """Its goals, or the service's where it has none of its own; ``e2e_scale`` is resolved into ``e2e_s``."""

    rank: float = 0.0
    """Its place among the waiting requests of the service: smaller first. Infinite where its goals are out of
    reach and it is put last."""
    queue_entry: int = 0
    """Number of its present stay in the queue; 0 while it does not wait."""
    rejected_epoch: int = -1
    """State of the scheduler in which it was last rejected: it is not looked at again in the same state."""
    blocked_until: int = 0
    """It waits until so many requests of the engine have ended (slices only)."""

    seq_id: int = -1
    """Names it to the executor while it runs; -1 while it does not."""
    block_ids: list[int] = field(default_factory=list)
    """Its block table."""
    num_shareable: int = 0
    """Leading blocks of the table that others can find: in the prefix index, or as choices of its call."""
    swapped_blocks: list[int] = field(default_factory=list)
    """Host blocks that hold the KV of its leading ``num_swapped_tokens``."""
    num_swapped_tokens: int = 0
    """Tokens whose KV is in ``swapped_blocks``."""

    ending: FinishReason | None = None
    """Why it ends at the update of the plan in flight; None: it does not."""
    finished: bool = False
    """Whether its last event was made."""
    queue_ns: int = 0
    """From its arrival to its first admission."""
    num_admissions: int = 0
    """How often it was admitted."""
    num_cached_tokens: int = 0
    """Prompt tokens found in the prefix index when it was first admitted."""
    num_preemptions: int = 0
    """How often it lost its blocks."""
    num_preempted_by_starvation: int = 0
    """How often it lost them to a starved request."""
    num_lost_tokens: int = 0
    """Tokens whose KV the last preemption dropped, until they are computed again."""
    num_recomputed_tokens: int = 0
    """Tokens computed again."""
    num_scored_tokens: int = 0
    """Leading prompt tokens whose log-probabilities were told, where they are wanted."""

    num_generated: int = 0
    """Progress: output tokens known."""
    num_scheduled: int = 0
    """Progress: tokens given to some plan."""
    num_computed: int = 0
    """Progress: tokens whose KV is in place."""
    num_published: int = 0
    """Progress: leading blocks that were offered to the prefix index."""
    in_flight: int = 0
    """Progress: plans in flight that it is part of."""
    slice_end: int = 0
    """Progress: number of tokens at which it needs its next slice."""
    predicted_tokens: int = 1
    """Progress: predicted output tokens, more than ``num_generated``."""
    service_time_ns: int = 0
    """Progress: durations of the steps it took part in."""
    last_scheduled_ns: int = 0
    """Progress: when it last took part in a step; before the first, when it was submitted."""
    first_token_ns: int = 0
    """Progress: when its first output token was known; 0: not yet."""
    last_token_ns: int = 0
    """Progress: when its newest output token was known."""
    largest_gap_ns: int = 0
    """Progress: longest time between two output tokens."""

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens known."""
        return self.num_prompt_tokens + self.num_generated

    @property
    def num_tokens_with_in_flight(self) -> int:
        """The same while it waits, when no plan is about to sample one."""
        return self.num_prompt_tokens + self.num_generated

    @property
    def is_scored(self) -> bool:
        """Whether log-probabilities of its prompt tokens are wanted."""
        return self.request.sampling.prompt_logprobs is not None

    @property
    def num_cacheable_tokens(self) -> int:
        """Leading tokens whose KV may be somebody else's.

        Whose log-probabilities are still to be told must be computed behind the tokens before it.
        """
        if not self.is_scored or self.num_scored_tokens >= self.num_prompt_tokens:
            return self.num_tokens
        return max(0, self.num_scored_tokens - 1)

    @property
    def num_blocks(self) -> int:
        """Length of the block table."""
        return len(self.block_ids)

    @property
    def arrival_ns(self) -> int:
        """When it arrived."""
        return self.request.arrival_ns

    @property
    def priority(self) -> int:
        """Given by its client: lower first."""
        return self.request.priority

    @property
    def prefilling(self) -> bool:
        """Not while it waits."""
        return False

    @property
    def deprioritized(self) -> bool:
        """Whether it waits behind all others of its service."""
        return self.rank == math.inf

    @property
    def is_ending(self) -> bool:
        """Whether it ends at the update of the plan in flight."""
        return self.ending is not None

    @property
    def postponed(self) -> bool:
        """Not while it waits."""
        return False

    @property
    def ttft_s(self) -> float:
        """Goal for the first token; NaN where there is none."""
        return math.nan if self.slo.ttft_s is None else self.slo.ttft_s

    @property
    def tpot_s(self) -> float:
        """Goal for each further token; NaN where there is none."""
        return math.nan if self.slo.tpot_s is None else self.slo.tpot_s

    @property
    def e2e_s(self) -> float:
        """Goal for the whole request; NaN where there is none."""
        return math.nan if self.slo.e2e_s is None else self.slo.e2e_s

    def check_stop(self, token: int, generated: int) -> tuple[FinishReason | None, int | None]:
        """Whether the newest of ``generated`` output tokens ends it, why, and with which stop token."""
        if token in self.stop_token_ids and self.request.sampling.may_stop_at(generated):
            return FinishReason.STOP, token
        true_tokens = self.request.true_output_tokens
        if true_tokens is not None and generated >= true_tokens:
            return FinishReason.STOP, None
        if generated >= self.max_new_tokens:
            return FinishReason.LENGTH, None
        return None, None

    def hash_known(self, block_size: int, until: int) -> None:
        """Extend ``block_hashes`` to the first ``until`` full blocks, as far as tokens are known.

        Tokens of a synthetic prompt that came without a hash, and outputs of which only the length is known,
        are like no other request's. Right while the request waits or has just been told of its tokens.
        """
        hashes = self.block_hashes
        if not self.token_ids:
            # 16 bytes, as those of tokens.
            own = b"own!" + self.number.to_bytes(6)
            hashes += [own + at.to_bytes(6) for at in range(len(hashes), until)]
            return
        while len(hashes) < until and (len(hashes) + 1) * block_size <= len(self.token_ids):
            start = len(hashes) * block_size
            parent = hashes[-1] if hashes else hash_salt(self.request.cache_salt)
            hashes.append(hash_next(parent, self.token_ids[start : start + block_size]))


def hash_prompt(prompt: Prompt, block_size: int, salt: str | None = None) -> list[bytes]:
    """Hashes of the full blocks of a prompt; a salt counts for token ids only."""
    if isinstance(prompt, SyntheticPrompt):
        return hash_synthetic(prompt.block_hashes[: len(prompt) // block_size])
    return hash_blocks(prompt, block_size, hash_salt(salt))


def new_request_state(
    request: Request, number: int, most_tokens: int, eos: tuple[int, ...], hashes: Sequence[bytes] = ()
) -> RequestState:
    """The state of a new request, or of one that is resumed (see ``resumption``).

    most_tokens: output tokens that its prompt leaves room for. hashes: of the prompt's full blocks, if
    anybody looks for them.
    """
    prompt, output = request.prompt, request.output_tokens
    length = len(prompt)
    limit = most_new_tokens(request, most_tokens)
    longest = limit if request.true_output_tokens is None else min(limit, request.true_output_tokens)
    stops = request.sampling.stop_token_ids + (() if request.sampling.ignore_eos else eos)
    seed = derive_seed(0, number)
    return RequestState(
        request=request,
        service=request.service,
        number=number,
        max_new_tokens=limit,
        stop_token_ids=frozenset(stops),
        num_prompt_tokens=length,
        num_final_tokens=length + longest,
        forecast_seed=seed - (1 << 64) if seed >> 63 else seed,
        token_ids=[] if isinstance(prompt, SyntheticPrompt) else [*prompt, *_token_ids(output)],
        block_hashes=list(hashes),
        num_generated=request.num_output_tokens,
    )


def _token_ids(output: Sequence[int] | int) -> Sequence[int]:
    """Those of output of which more than the number is known."""
    return () if isinstance(output, int) else output


def most_new_tokens(request: Request, most_tokens: int) -> int:
    """Most output tokens of a request; most_tokens: those that its prompt leaves room for."""
    if request.resume_state is not None:
        return request.resume_state.max_new_tokens
    return most_tokens if request.sampling.max_tokens is None else request.sampling.max_tokens
