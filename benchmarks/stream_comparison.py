"""Requests of chaos and migration benchmarks, and comparison of outputs with an undisturbed run."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from shoal.cluster.router.router import Router
from shoal.core import SamplingParams
from shoal.models import Tokenizer

SERVICE = "chat"
TOLERANCE = 1e-3
"""Of log-probabilities; two likeliest tokens closer than this are a tie and may be exchanged."""
_WORDS = "river stone light market winter garden engine letter window bridge copper music story harbour"


@dataclass(frozen=True)
class Job:
    """One request."""

    prompt: tuple[int, ...]
    max_tokens: int


@dataclass
class Output:
    """Tokens of one answer."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    """Difference of the log-probabilities of the two likeliest tokens."""


@dataclass
class Differences:
    """Results of comparisons with undisturbed outputs."""

    compared: int = 0
    different: list[str] = field(default_factory=list)
    ties: int = 0
    """Outputs that differ at a tie."""

    def compare(self, output: Output, undisturbed: Output) -> None:
        """Record the first difference, if any."""
        self.compared += 1
        if len(output.tokens) != len(undisturbed.tokens):
            self.different.append(f"{len(output.tokens)} tokens for {len(undisturbed.tokens)}")
            return
        for at, (token, expected) in enumerate(zip(output.tokens, undisturbed.tokens, strict=True)):
            if token != expected:
                gap = undisturbed.gaps[at]
                if gap < TOLERANCE:
                    self.ties += 1
                else:
                    self.different.append(f"token {at}: {token} for {expected}, gap {gap:.4f}")
                return
            difference = abs(output.logprobs[at] - undisturbed.logprobs[at])
            if difference > TOLERANCE:
                self.different.append(f"log-probability {at} differs by {difference:.4f}")
                return

    @property
    def none(self) -> bool:
        """Whether outputs differ only at ties, and few of them."""
        return not self.different and self.ties <= max(1, self.compared // 1000)


def make_jobs(tokenizer: Tokenizer, count: int, max_tokens: int) -> list[Job]:
    """Prompts of very different lengths; every second one has a common prefix."""
    rng = random.Random(7)
    words = _WORDS.split()
    jobs = []
    for number in range(count):
        opening = "Tell me a long story. " if number % 2 else ""
        text = opening + " ".join(rng.choice(words) for _ in range(rng.choice([8, 20, 50, 100])))
        jobs.append(Job(tuple(tokenizer.encode(text)), rng.randrange(max_tokens // 3, max_tokens + 1)))
    return jobs


async def read_job(router: Router, job: Job, on_tokens: Callable[[str, int], None]) -> Output:
    """Read a stream to its end. on_tokens: called with its id and the number of new tokens."""
    sampling = SamplingParams(temperature=0.0, max_tokens=job.max_tokens, ignore_eos=True, logprobs=2)
    output = Output()
    async with await router.submit(SERVICE, list(job.prompt), sampling) as stream:
        async for delta in stream:
            if delta.tokens:
                on_tokens(stream.id, len(delta.tokens))
            output.tokens += delta.tokens
            for entry in delta.logprobs or ():
                output.logprobs.append(entry.logprob)
                (_, best), (_, second) = entry.top[:2]
                output.gaps.append(best - second)
    return output
