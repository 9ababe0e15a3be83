"""A request for one continuation, and the events that answer it."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import NamedTuple

from shoal.core.sampling import SamplingParams
from shoal.core.service import NO_GOALS, SLO


@dataclass(frozen=True, slots=True)
class SyntheticPrompt:
    """A prompt of which only the length matters, for traces and simulation."""

    length: int
    """Length in tokens."""
    block_hashes: tuple[int, ...] = ()
    """One hash for each full KV block; equal hashes mean equal prefixes. Empty: nothing is shared."""

    def __len__(self) -> int:
        """Length in tokens."""
        return self.length


Prompt = Sequence[int] | SyntheticPrompt


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeState:
    """What earlier engines counted of a request that is resumed.

    Clocks of two hosts have nothing in common, so times are ages: how long ago something was when the request
    is submitted again. Those of tokens mean nothing before there is one.
    """

    max_new_tokens: int
    """Most output tokens, those already made included; fixed when the request was first submitted."""
    age_ns: int = 0
    """Since it arrived."""
    first_token_age_ns: int = 0
    """Since its first output token was known."""
    last_token_age_ns: int = 0
    """Since its newest output token was known."""
    largest_gap_ns: int = 0
    """Longest time between two output tokens."""
    service_time_ns: int = 0
    """Durations of the steps it took part in."""
    num_cached_tokens: int = 0
    """Prompt tokens found in the prefix index when it was first admitted."""
    queue_ns: int = 0
    """From its arrival to its first admission."""
    num_admissions: int = 0
    """How often it was admitted."""
    num_preemptions: int = 0
    """How often it lost its blocks to others."""
    num_preempted_by_starvation: int = 0
    """How often it lost them to a starved request."""
    num_recomputed_tokens: int = 0
    """Tokens computed again."""
    num_scored_tokens: int = 0
    """Leading prompt tokens whose log-probabilities were told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One accepted request for one continuation of one prompt (``n`` choices are ``n`` requests)."""

    id: str
    """Unique among the requests of an engine."""
    service: str
    """The service that shall answer."""
    prompt: Prompt
    """Token ids, or only their number."""
    sampling: SamplingParams = field(default_factory=SamplingParams)
    """How its tokens are sampled and when it ends."""
    arrival_ns: int = 0
    """When it arrived. Of a resumed request its age counts instead (``on_clock``)."""
    seed: int = 0
    """Keys every draw of this request; different for the choices of one call."""
    true_output_tokens: int | None = None
    """The output length, if it is known beforehand (workloads). Only simulation and policies called
    ``oracle`` read it."""
    slo: SLO = NO_GOALS
    """Goals of this request; those left None are its service's."""
    priority: int = 0
    """Where the order is ``priority``: lower ones come first."""
    cache_salt: str | None = None
    """Only requests with the same salt, or all without, share prefixes."""
    output_tokens: tuple[int, ...] | int = ()
    """Output that was made before this submission, the prompt's continuation so far: token ids, or their
    number where the prompt is synthetic. No event tells them again."""
    resume_state: ResumeState | None = None
    """What was counted of it before this submission; None: it is submitted for the first time."""

    @property
    def num_output_tokens(self) -> int:
        """Output tokens made before this submission."""
        return self.output_tokens if isinstance(self.output_tokens, int) else len(self.output_tokens)

    @property
    def first_token_ns(self) -> int:
        """When the first of these was known, on the clock of ``arrival_ns``; on arrival if nobody says."""
        state = self.resume_state
        return self.arrival_ns + (0 if state is None else state.age_ns - state.first_token_age_ns)

    @property
    def last_token_ns(self) -> int:
        """The same of the newest."""
        state = self.resume_state
        return self.arrival_ns + (0 if state is None else state.age_ns - state.last_token_age_ns)

    def on_clock(self, now_ns: int) -> "Request":
        """The request with the arrival that its age means on a clock that shows ``now_ns``."""
        return (
            self if self.resume_state is None else replace(self, arrival_ns=now_ns - self.resume_state.age_ns)
        )

    def aged(self, passed_ns: int) -> "Request":
        """The request when so much time has passed since its ages were taken."""
        state = self.resume_state
        if state is None:
            return self
        aged = replace(
            state,
            age_ns=state.age_ns + passed_ns,
            first_token_age_ns=state.first_token_age_ns + passed_ns,
            last_token_age_ns=state.last_token_age_ns + passed_ns,
        )
        return replace(self, resume_state=aged)


class FinishReason(StrEnum):
    """Why a request ended; ``stop`` and ``length`` are OpenAI's words."""

    STOP = "stop"
    """An end-of-sequence token, a stop token or a stop string."""
    LENGTH = "length"
    """As many tokens as allowed."""
    CANCELLED = "cancelled"
    """By the client."""
    ERROR = "error"
    """It could not be computed."""
    INVALID = "invalid"
    """What it asks for excludes every token (HTTP 400)."""
    REFUSED = "refused"
    """It waited until its latency goals were out of reach, and is not wanted any more (HTTP 429)."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one position, from the distribution before temperature and truncation."""

    token: int
    """The sampled token, or that of the prompt."""
    logprob: float
    """Its log-probability."""
    top: tuple[tuple[int, float], ...] = ()
    """(token, log-probability) of the likeliest tokens, in falling order."""
    rank: int = 0
    """Of a prompt's token: its place among all tokens by falling probability, from 1."""


class TokenEvent(NamedTuple):
    """What one step did for one request: new tokens, and whether it finished.

    A named tuple, because there is an event for every token, and a frozen dataclass takes several times as
    long to make.
    """

    request_id: str
    """Which request."""
    tokens: tuple[int, ...] = ()
    """New output tokens, including an end-of-sequence or stop token that ends it."""
    logprobs: tuple[TokenLogprobs, ...] | None = None
    """Of each new token, if the request wants them."""
    finish: FinishReason | None = None
    """Why it finished; None if it goes on."""
    stop_token: int | None = None
    """The end-of-sequence or stop token that ended it, which is not part of the text."""
    error: str | None = None
    """Explains FinishReason.ERROR, INVALID and REFUSED."""
    cached_tokens: int = 0
    """Prompt tokens found in the prefix index at the first admission."""
    queue_ns: int = 0
    """From arrival to the first admission; told with the first token and at the end, else 0."""
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    """Of the next prompt tokens, if the request wants them; those of all its events together are of all
    prompt tokens but the first."""
    embedding: bytes | None = None
    """The prompt's embedding as float32, little-endian, if the request wants it; with its first token."""
    position: int = 0
    """Output tokens that the request had before these, with those that it was resumed with."""
