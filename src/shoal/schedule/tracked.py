"""One request on its way through the scheduler."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter

from shoal.core import NO_GOALS, SLO, FinishReason, Prompt, Request, SyntheticPrompt, derive_seed
from shoal.kvcache import hash_blocks, hash_next, hash_synthetic

BY_SEQUENCE = attrgetter("sequence")
"""A key that sorts running requests by admission."""


@dataclass(slots=True, eq=False)
class Tracked:
    """The state of one unfinished request. Only the scheduler writes it; policies read.

    There is no phase: of ``expected`` tokens, ``scheduled`` have been given to some plan, and the
    difference is what a step may compute next. ``computed`` of them have their KV in place.

        |<- computed ->|<- in flight ->|<- missing ->|
        0          computed        scheduled      expected

    service: the one it asks. number: place in the order of submission. ceiling: most output tokens. stops:
    tokens that end it. seed: keys its forecasts. tokens: prompt and output (empty for a synthetic prompt, of
    which only lengths matter). generated: output tokens known. expected: tokens known plus those that plans
    in flight will sample. sequence: its number among running requests, None while it waits. blocks: its
    block table. hashes: of its leading full blocks. published: leading blocks that were offered to the
    prefix index; shareable: those of them that others can find there. in_flight: plans in flight it is part
    of. cached_tokens: prompt tokens found in the prefix index at its first admission. lost: tokens whose KV
    an eviction dropped. charged_ns: durations of the steps it took part in. served_ns: when it last took
    part in a step (before the first: when it was submitted). predicted: believed output tokens, more than
    ``generated``. slo: its goals, the service's where it has none of its own, ``e2e_scale`` resolved into
    ``e2e_s``. rank: its place among the waiting; entry: number of its present stay there (0: none).
    first_token_ns, last_token_ns: when its first and its newest output token were known (0: not yet).
    largest_gap_ns: longest time between two of them. recomputed: tokens computed again. slice_end: tokens
    expected at which it needs its next slice (the last token where the admission knows no slices). saved:
    host blocks that hold the KV of its leading ``saved_tokens``. blocked_until: it waits until so many
    requests of the engine have ended. displaced: how often it was evicted for a starved request. ending: why
    it ends at the update of the plan in flight (None: it does not). refused_epoch: the scheduler's state in
    which it was last turned away.
    """

    request: Request
    service: str
    number: int
    ceiling: int
    stops: frozenset[int]
    prompt_tokens: int
    last_token: int
    seed: int
    tokens: list[int]
    hashes: list[bytes]
    expected: int
    generated: int = 0
    scheduled: int = 0
    computed: int = 0
    sequence: int | None = None
    blocks: list[int] = field(default_factory=list)
    published: int = 0
    shareable: int = 0
    in_flight: int = 0
    admitted: bool = False
    ending: FinishReason | None = None
    ended: bool = False
    evictions: int = 0
    cached_tokens: int = 0
    lost: int = 0
    charged_ns: int = 0
    served_ns: int = 0
    predicted: int = 1
    slo: SLO = NO_GOALS
    rank: float = 0.0
    entry: int = 0
    first_token_ns: int = 0
    last_token_ns: int = 0
    largest_gap_ns: int = 0
    recomputed: int = 0
    slice_end: int = 0
    saved: list[int] = field(default_factory=list)
    saved_tokens: int = 0
    blocked_until: int = 0
    displaced: int = 0
    refused_epoch: int = -1

    @property
    def known(self) -> int:
        """Tokens known: prompt and output."""
        return self.prompt_tokens + self.generated

    def hash_known(self, block_size: int, until: int) -> None:
        """Extend ``hashes`` to the first ``until`` full blocks, as far as tokens are known.

        Tokens of a synthetic prompt that came without a hash, and outputs of which only the length is known,
        are like no other request's.
        """
        if not self.tokens:
            # 16 bytes, as those of tokens.
            own = b"own!" + self.number.to_bytes(6)
            blocks = range(len(self.hashes), min(until, self.known // block_size))
            self.hashes += [own + at.to_bytes(6) for at in blocks]
            return
        while len(self.hashes) < until and (len(self.hashes) + 1) * block_size <= len(self.tokens):
            start = len(self.hashes) * block_size
            parent = self.hashes[-1] if self.hashes else b""
            self.hashes.append(hash_next(parent, self.tokens[start : start + block_size]))


def hash_prompt(prompt: Prompt, block_size: int) -> list[bytes]:
    """Hashes of the full blocks of a prompt; here alone prompts are hashed."""
    if isinstance(prompt, SyntheticPrompt):
        return hash_synthetic(prompt.block_hashes[: len(prompt) // block_size])
    return hash_blocks(prompt, block_size)


def track(
    request: Request, number: int, ceiling: int, eos: tuple[int, ...], hashes: Sequence[bytes] = ()
) -> Tracked:
    """A new request's state. hashes: of its prompt, if anybody looks for them."""
    prompt = request.prompt
    length = len(prompt)
    limit = ceiling if request.sampling.max_tokens is None else request.sampling.max_tokens
    longest = limit if request.true_output_tokens is None else min(limit, request.true_output_tokens)
    stops = request.sampling.stop_token_ids + (() if request.sampling.ignore_eos else eos)
    return Tracked(
        request=request,
        service=request.service,
        number=number,
        ceiling=limit,
        stops=frozenset(stops),
        prompt_tokens=length,
        last_token=length + longest,
        seed=derive_seed(0, number),
        tokens=[] if isinstance(prompt, SyntheticPrompt) else list(prompt),
        hashes=list(hashes),
        expected=length,
    )
