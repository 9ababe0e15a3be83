"""Expands a call into one request for each of its ``n`` choices, with derived seeds."""

import secrets
from collections.abc import Sequence
from dataclasses import replace

from shoal.core import SLO, Client, Request, SamplingParams, derive_seed
from shoal.core.service import NO_GOALS


def expand_choices(
    call_id: str,
    service: str,
    prompt: Sequence[int],
    sampling: SamplingParams,
    arrival_ns: int,
    slo: SLO = NO_GOALS,
    output_tokens: tuple[int, ...] = (),
    priority: int = 0,
    cache_salt: str | None = None,
    client: Client | None = None,
) -> list[Request]:
    """The requests of one call, in the order of its choices.

    Seeds derive from ``sampling.seed``, or from a random one if it is None, so that the choices differ. The
    requests have ``n`` = 1 and no stop strings, which are found in the detokenized text. Only the first one
    has ``prompt_logprobs``, which are the same for all. slo, priority, cache_salt, client: of each request.
    output_tokens: earlier output of each request.
    """
    seed = secrets.randbits(63) if sampling.seed is None else sampling.seed
    first = replace(sampling, n=1, stop=(), seed=seed)
    rest = first if sampling.prompt_logprobs is None else replace(first, prompt_logprobs=None)
    return [
        Request(
            id=f"{call_id}-{choice}",
            service=service,
            prompt=prompt,
            sampling=rest if choice else first,
            arrival_ns=arrival_ns,
            seed=derive_seed(seed, choice),
            slo=slo,
            output_tokens=output_tokens,
            priority=priority,
            cache_salt=cache_salt,
            client=client,
        )
        for choice in range(sampling.n)
    ]
