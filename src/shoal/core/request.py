"""One request for one continuation, and what comes back for it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from shoal.core.sampling import SamplingParams
from shoal.core.service import NO_GOALS, SLO


@dataclass(frozen=True, slots=True)
class SyntheticPrompt:
    """A prompt of which only the length matters: traces and simulation.

    block_hashes: one hash per full KV block, equal hashes meaning equal prefixes; empty means that
    nothing is shared.
    """

    length: int
    block_hashes: tuple[int, ...] = ()

    def __len__(self) -> int:
        """Length in tokens."""
        return self.length


Prompt = Sequence[int] | SyntheticPrompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One accepted request for one continuation of one prompt (``n`` choices are ``n`` requests).

    seed: keys every draw of this request; already differs between the choices of one call.
    true_output_tokens: the output length when it is known beforehand (workloads); read only by what is
    called ``oracle`` and by simulation. slo: goals of this request; those left None are its service's.
    """

    id: str
    service: str
    prompt: Prompt
    sampling: SamplingParams = field(default_factory=SamplingParams)
    arrival_ns: int = 0
    seed: int = 0
    true_output_tokens: int | None = None
    slo: SLO = NO_GOALS


class FinishReason(StrEnum):
    """Why a request ended; ``stop`` and ``length`` are OpenAI's words."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one output position, of the distribution before temperature and cuts.

    logprob: of the token that was sampled. top: (token, logprob), likeliest first.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class TokenEvent(NamedTuple):
    """What one step did for one request: new tokens, and whether it ended.

    A tuple, since one is made for every token, and a frozen dataclass takes several times as long to make.

    A request that ends on an end-of-sequence or stop token carries that token in ``tokens``;
    ``stop_token`` then says which one, so that text can leave it out. ``error`` explains
    FinishReason.ERROR. ``cached_tokens`` counts prompt tokens found in the prefix index at the first
    admission.
    """

    request_id: str
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] | None = None
    finish: FinishReason | None = None
    stop_token: int | None = None
    error: str | None = None
    cached_tokens: int = 0
