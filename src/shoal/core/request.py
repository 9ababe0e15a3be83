"""Request, finish reasons, and the token events that answer it; the state of a resumed request."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import NamedTuple

from shoal.core.sampling import SamplingParams
from shoal.core.service import NO_GOALS, SLO


@dataclass(frozen=True, slots=True)
class SyntheticPrompt:
    """A prompt without token ids, for traces and simulation."""

    length: int
    """In tokens."""
    block_hashes: tuple[int, ...] = ()
    """One hash for each full KV block; equal hashes mean equal prefixes. Empty: nothing is shared."""

    def __len__(self) -> int:
        return self.length


Prompt = Sequence[int] | SyntheticPrompt


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeState:
    """Counters and times that a resumed request brings from earlier engines.

    Clocks of two hosts are unrelated, so times are ages at the time of the new submission. Ages of tokens
    mean nothing while there is no output.
    """

    max_new_tokens: int
    """Limit on the whole output; fixed when the request was first submitted."""
    age_ns: int = 0
    """Since arrival."""
    first_token_age_ns: int = 0
    last_token_age_ns: int = 0
    largest_gap_ns: int = 0
    """Longest inter-token latency."""
    service_time_ns: int = 0
    """Total duration of the steps it took part in."""
    num_cached_tokens: int = 0
    """Prefix cache hit at the first admission."""
    queue_ns: int = 0
    """From arrival to the first admission."""
    num_admissions: int = 0
    num_preemptions: int = 0
    num_preempted_by_starvation: int = 0
    """Preemptions in favor of a starved request."""
    num_recomputed_tokens: int = 0
    """Tokens computed again after preemptions."""
    num_scored_tokens: int = 0
    """Leading prompt tokens whose log-probabilities were reported."""


class Client(NamedTuple):
    """Whose share of an engine a request counts against, for the order ``fair``."""

    name: str
    share: float = 1.0
    """A client with the share 2 gets twice as much as one with 1, while both want more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A request for one continuation of one prompt (``n`` choices are ``n`` requests)."""

    id: str
    """Unique among the requests of an engine."""
    service: str
    prompt: Prompt
    sampling: SamplingParams = field(default_factory=SamplingParams)
    arrival_ns: int = 0
    """Ignored for a resumed request, which has an age instead (``on_clock``)."""
    seed: int = 0
    """Key of every random draw; different for each choice of a call."""
    true_output_tokens: int | None = None
    """The output length of a workload that knows it. Read only by simulation and by policies called
    ``oracle``."""
    slo: SLO = NO_GOALS
    """Goals left None are those of the service."""
    priority: int = 0
    """For the order ``priority``: the lowest comes first."""
    client: Client | None = None
    """Read by the order ``fair``; None: it counts with all others that have none."""
    cache_salt: str | None = None
    """Only requests with the same salt, or all without one, share prefixes."""
    output_tokens: tuple[int, ...] | int = ()
    """Output from before this submission: token ids, or their number for a synthetic prompt. No event
    repeats them."""
    resume_state: ResumeState | None = None
    """None: it is submitted for the first time."""
    batch: int | None = None
    """Number of the batch that it was dispatched with, for the admission ``batch``; lower ones come first.
    None: it is a batch of its own."""
    slice_tokens: int | None = None
    """Further output tokens of this submission: then it ends with SLICE, to be submitted again. None: no
    limit but its own."""

    @property
    def num_output_tokens(self) -> int:
        """Number of ``output_tokens``."""
        return self.output_tokens if isinstance(self.output_tokens, int) else len(self.output_tokens)

    @property
    def first_token_ns(self) -> int:
        """Time of the first of ``output_tokens``, on the clock of ``arrival_ns``; the arrival if unknown."""
        state = self.resume_state
        return self.arrival_ns + (0 if state is None else state.age_ns - state.first_token_age_ns)

    @property
    def last_token_ns(self) -> int:
        """Time of the last of ``output_tokens``; see ``first_token_ns``."""
        state = self.resume_state
        return self.arrival_ns + (0 if state is None else state.age_ns - state.last_token_age_ns)

    def on_clock(self, now_ns: int) -> "Request":
        """The request with ``arrival_ns`` computed from its age, on a clock that shows ``now_ns``."""
        return (
            self if self.resume_state is None else replace(self, arrival_ns=now_ns - self.resume_state.age_ns)
        )

    def aged(self, elapsed_ns: int) -> "Request":
        """The request with ``elapsed_ns`` added to the ages of its resume state."""
        state = self.resume_state
        if state is None:
            return self
        aged = replace(
            state,
            age_ns=state.age_ns + elapsed_ns,
            first_token_age_ns=state.first_token_age_ns + elapsed_ns,
            last_token_age_ns=state.last_token_age_ns + elapsed_ns,
        )
        return replace(self, resume_state=aged)


class FinishReason(StrEnum):
    """Why a request ended; ``stop`` and ``length`` are OpenAI's values."""

    STOP = "stop"
    """An end-of-sequence token, a stop token or a stop string."""
    LENGTH = "length"
    """``max_tokens``, or the context length."""
    CANCELLED = "cancelled"
    """By the client."""
    ERROR = "error"
    INVALID = "invalid"
    """Its constraints exclude every token (HTTP 400)."""
    REFUSED = "refused"
    """Its latency goals can no longer be met (HTTP 429)."""
    SLICE = "slice"
    """Its ``slice_tokens`` are over; it is submitted again with its output. Clients do not see this."""
    UNLOADED = "unloaded"
    """This engine cannot load its weights, but another may. Clients see ERROR instead."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one position, from the distribution before temperature and truncation."""

    token: int
    """The sampled token, or the prompt's."""
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """(token, log-probability) of the most likely tokens, in falling order."""
    rank: int = 0
    """For prompt tokens: rank among all tokens by falling probability, from 1."""


class TokenEvent(NamedTuple):
    """The result of one step for one request: new tokens, and whether it finished.

    A named tuple, because there is an event for every token, and a frozen dataclass takes several times as
    long to create.
    """

    request_id: str
    tokens: tuple[int, ...] = ()
    """New output tokens, including the end-of-sequence or stop token."""
    logprobs: tuple[TokenLogprobs, ...] | None = None
    """For each new token, if the request wants them."""
    finish: FinishReason | None = None
    """None: the request goes on."""
    stop_token: int | None = None
    """The end-of-sequence or stop token that ended it, which is not part of the text."""
    error: str | None = None
    """Message for FinishReason.ERROR, INVALID, REFUSED and UNLOADED."""
    cached_tokens: int = 0
    """Prefix cache hit at the first admission."""
    queue_ns: int = 0
    """From arrival to the first admission; set with the first token and at the end, else 0."""
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    """For the next prompt tokens, if the request wants them; all events together cover all prompt tokens but
    the first."""
    embedding: bytes | None = None
    """The prompt's embedding as float32, little-endian, if the request wants it; with its first token."""
    position: int = 0
    """Output tokens before these, including those that the request was resumed with."""
