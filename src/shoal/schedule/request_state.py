"""State of an unfinished request: tokens, block table, counters, stop conditions (EOS, length)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from shoal.core import NO_GOALS, SLO, FinishReason, Prompt, Request, SyntheticPrompt, TokenEvent, derive_seed
from shoal.core.length_limits import resolve_max_new_tokens
from shoal.kvcache import hash_blocks, hash_next, hash_salt, hash_synthetic
from shoal.schedule.client_accounts import NO_ACCOUNT, Account


@dataclass(slots=True, eq=False, repr=False)
class RequestState:
    """State of one unfinished request. Only the scheduler writes it.

    While the request is running, its progress is a row of the service's ``RunningBatch``, and the fields
    marked *progress* here have no value: reading one is an AttributeError. They are set again when the row is
    removed.
    """

    request: Request
    """As submitted, with its arrival on the scheduler's clock."""
    service: str
    number: int
    """Number of its submission."""
    max_new_tokens: int
    """Limit on the whole output."""
    stop_token_ids: frozenset[int]
    """Stop tokens and, unless ``ignore_eos``, end-of-sequence tokens."""
    num_prompt_tokens: int
    num_final_tokens: int
    """Prompt and output tokens at its end: the true number if it is known, else the maximum; at most those of
    its slice (``Request.slice_tokens``)."""
    forecast_seed: int
    """Key of the draws of its output length: 64 bits, as a signed number."""
    token_ids: list[int]
    """Prompt and output; empty for a synthetic prompt, of which only lengths are known."""
    block_hashes: list[bytes]
    """Hashes of its leading full blocks, as far as they were needed."""
    account: Account = NO_ACCOUNT
    """What its client has used, for orders that read it."""
    choices: list["RequestState"] = field(default_factory=list)
    """Unfinished choices of its call with this prompt, including itself; empty without other choices."""
    choice_has_output: bool = False
    """Whether a choice of its call has ended with output."""
    slo: SLO = NO_GOALS
    """Effective goals; ``e2e_scale`` is resolved into ``e2e_s``."""

    rank: float = 0.0
    """Position among the waiting requests of the service: smaller first. Infinite if its goals can no longer
    be met and it is put last."""
    queue_entry: int = 0
    """Number of its current entry in the waiting queue; 0 while it is not waiting."""
    rejected_epoch: int = -1
    """Epoch of the scheduler in which it was last rejected; it is not examined again in the same epoch."""
    blocked_until_num_ended: int = 0
    """It is not admitted before this many requests of the engine have ended (slices only)."""

    seq_id: int = -1
    """Sequence id in plans while it is running, else -1."""
    block_ids: list[int] = field(default_factory=list)
    """Its block table."""
    num_shareable: int = 0
    """Leading blocks of the block table that other requests can share, by the prefix index or as choices."""
    swapped_blocks: list[int] = field(default_factory=list)
    """Host blocks with the KV of its leading ``num_swapped_tokens``."""
    num_swapped_tokens: int = 0

    ending: FinishReason | None = None
    """The reason if it ends at the update of the plan in flight, else None."""
    finished: bool = False
    queue_ns: int = 0
    """From arrival to the first admission."""
    num_admissions: int = 0
    num_cached_tokens: int = 0
    """Prefix cache hit at the first admission."""
    num_preemptions: int = 0
    num_preempted_by_starvation: int = 0
    """Preemptions in favor of a starved request."""
    num_lost_tokens: int = 0
    """Tokens whose KV the last preemption dropped, until they are computed again."""
    num_recomputed_tokens: int = 0
    """Tokens computed again after preemptions."""
    num_scored_tokens: int = 0
    """Leading prompt tokens whose log-probabilities were reported."""

    num_generated: int = 0
    """Progress: output tokens known."""
    num_scheduled: int = 0
    """Progress: tokens scheduled in some plan."""
    num_computed: int = 0
    """Progress: tokens whose KV is in place."""
    num_published: int = 0
    """Progress: leading blocks that were published in the prefix index."""
    in_flight: int = 0
    """Progress: plans in flight that it is part of."""
    slice_end: int = 0
    """Progress: number of tokens at which it needs its next slice."""
    predicted_tokens: int = 1
    """Progress: predicted output tokens, more than ``num_generated``."""
    service_time_ns: int = 0
    """Progress: total duration of the steps it took part in."""
    last_scheduled_ns: int = 0
    """Progress: when it last took part in a step; before the first, when it was submitted."""
    first_token_ns: int = 0
    """Progress: time of the first output token; 0: none yet."""
    last_token_ns: int = 0
    """Progress: time of the newest output token."""
    largest_gap_ns: int = 0
    """Progress: longest inter-token latency."""

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens known."""
        return self.num_prompt_tokens + self.num_generated

    @property
    def num_tokens_with_in_flight(self) -> int:
        """As ``num_tokens``: no plan in flight samples for a waiting request."""
        return self.num_prompt_tokens + self.num_generated

    @property
    def is_scored(self) -> bool:
        """Whether log-probabilities of its prompt tokens are wanted."""
        return self.request.sampling.prompt_logprobs is not None

    @property
    def num_cacheable_tokens(self) -> int:
        """Leading tokens whose KV may come from the prefix cache or another choice.

        Tokens whose log-probabilities are still to be reported must be computed.
        """
        if not self.is_scored or self.num_scored_tokens >= self.num_prompt_tokens:
            return self.num_tokens
        return max(0, self.num_scored_tokens - 1)

    @property
    def num_blocks(self) -> int:
        return len(self.block_ids)

    @property
    def batch_order(self) -> tuple[bool, int]:
        """Batches in the order in which they run; without a batch it is one of its own."""
        batch = self.request.batch
        return (False, batch) if batch is not None else (True, self.number)

    @property
    def arrival_ns(self) -> int:
        return self.request.arrival_ns

    @property
    def priority(self) -> int:
        """Given by the client; the lowest comes first."""
        return self.request.priority

    @property
    def prefilling(self) -> bool:
        """Never while it is waiting."""
        return False

    @property
    def deprioritized(self) -> bool:
        """Whether it is put behind all other waiting requests of its service."""
        return self.rank == math.inf

    @property
    def is_ending(self) -> bool:
        """Whether it ends at the update of the plan in flight."""
        return self.ending is not None

    @property
    def postponed(self) -> bool:
        """Never while it is waiting."""
        return False

    @property
    def ttft_s(self) -> float:
        """TTFT goal; NaN: none."""
        return math.nan if self.slo.ttft_s is None else self.slo.ttft_s

    @property
    def tpot_s(self) -> float:
        """Goal for the mean time per output token; NaN: none."""
        return math.nan if self.slo.tpot_s is None else self.slo.tpot_s

    @property
    def mtpot_s(self) -> float:
        """Goal for the largest inter-token latency; NaN: none."""
        return math.nan if self.slo.mtpot_s is None else self.slo.mtpot_s

    @property
    def e2e_s(self) -> float:
        """End-to-end goal; NaN: none."""
        return math.nan if self.slo.e2e_s is None else self.slo.e2e_s

    def check_stop(self, token: int, generated: int) -> tuple[FinishReason | None, int | None]:
        """(reason, stop token) if ``token``, the last of ``generated`` output tokens, ends the request."""
        if token in self.stop_token_ids and self.request.sampling.may_stop_at(generated):
            return FinishReason.STOP, token
        true_tokens = self.request.true_output_tokens
        if true_tokens is not None and generated >= true_tokens:
            return FinishReason.STOP, None
        if generated >= self.max_new_tokens:
            return FinishReason.LENGTH, None
        if generated >= self.num_final_tokens - self.num_prompt_tokens:
            return FinishReason.SLICE, None
        return None, None

    def extend_hashes(self, block_size: int, until: int) -> None:
        """Extend ``block_hashes`` to the first ``until`` full blocks, as far as ``token_ids`` are known.

        Blocks of a synthetic prompt without a hash, and of outputs of which only the length is known, get
        hashes that no other request has.
        """
        hashes = self.block_hashes
        if not self.token_ids:
            # 16 bytes, like the hashes of tokens.
            own = b"own!" + self.number.to_bytes(6)
            hashes += [own + at.to_bytes(6) for at in range(len(hashes), until)]
            return
        while len(hashes) < until and (len(hashes) + 1) * block_size <= len(self.token_ids):
            start = len(hashes) * block_size
            parent = hashes[-1] if hashes else hash_salt(self.request.cache_salt)
            hashes.append(hash_next(parent, self.token_ids[start : start + block_size]))


def last_event(
    request: RequestState,
    position: int,
    reason: FinishReason,
    tokens: tuple[int, ...] = (),
    *,
    stop_token: int | None = None,
    error: str | None = None,
) -> TokenEvent:
    """The event that ends a request; position: output tokens before ``tokens``."""
    return TokenEvent(
        request.request.id,
        tokens,
        finish=reason,
        stop_token=stop_token,
        error=error,
        cached_tokens=request.num_cached_tokens,
        queue_ns=request.queue_ns,
        position=position,
    )


def hash_prompt(prompt: Prompt, block_size: int, salt: str | None = None) -> list[bytes]:
    """Hashes of the full blocks of a prompt; the salt is ignored for synthetic prompts."""
    if isinstance(prompt, SyntheticPrompt):
        return hash_synthetic(prompt.block_hashes[: len(prompt) // block_size])
    return hash_blocks(prompt, block_size, hash_salt(salt))


def new_request_state(
    request: Request, number: int, max_output_tokens: int, eos: tuple[int, ...], hashes: Sequence[bytes] = ()
) -> RequestState:
    """The state of a new or resumed request.

    max_output_tokens: output tokens for which there is room after the prompt. hashes: of the prompt's full
    blocks, with prefix caching.
    """
    prompt, output = request.prompt, request.output_tokens
    length = len(prompt)
    limit = resolve_max_new_tokens(request.sampling, request.resume_state, max_output_tokens)
    longest = limit if request.true_output_tokens is None else min(limit, request.true_output_tokens)
    if request.slice_tokens is not None:
        longest = min(longest, request.num_output_tokens + request.slice_tokens)
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
    """Empty if only the number of output tokens is known."""
    return () if isinstance(output, int) else output
