"""One call becomes one request for each of its ``n`` choices."""

import secrets
from collections.abc import Sequence
from dataclasses import replace

from shoal.core import SLO, Request, SamplingParams, derive_seed
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
) -> list[Request]:
    """The requests of one call, in the order of its choices.

    Their seeds derive from ``sampling.seed``, or from a random one if it is None, so that the choices
    differ. Their sampling parameters are those that an engine needs: ``n`` is 1, and there are no stop
    strings, which are found where text is made. Only the first is asked for log-probabilities of the prompt,
    which are the same for all. slo: goals of each request. output_tokens: output that each
    has already. priority, cache_salt: of each request.
    """
    seed = secrets.randbits(63) if sampling.seed is None else sampling.seed
    single = replace(sampling, n=1, stop=(), seed=seed)
    further = single if sampling.prompt_logprobs is None else replace(single, prompt_logprobs=None)
    return [
        Request(
            id=f"{call_id}-{choice}",
            service=service,
            prompt=prompt,
            sampling=further if choice else single,
            arrival_ns=arrival_ns,
            seed=derive_seed(seed, choice),
            slo=slo,
            output_tokens=output_tokens,
            priority=priority,
            cache_salt=cache_salt,
        )
        for choice in range(sampling.n)
    ]
