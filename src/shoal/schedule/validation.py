"""Which requests can be served at all."""

from collections.abc import Mapping
from dataclasses import dataclass

from shoal.core import NO_GOALS, SLO, InvalidRequest, Request, SyntheticPrompt
from shoal.kvcache import BlockPool
from shoal.schedule.request_state import most_new_tokens


@dataclass(frozen=True, slots=True)
class ServiceLimits:
    """What a service's model allows, and what is wanted of it.

    context_tokens: of the model. eos_token_ids: tokens that end an output. slo, execution_s, quota: as in
    ``Service``. weights: services for which it is the same run on the same weights; None: it has its own.
    """

    context_tokens: int
    eos_token_ids: tuple[int, ...] = ()
    slo: SLO = NO_GOALS
    execution_s: float | None = None
    quota: int = 8
    weights: str | None = None


def longest_total(pool: BlockPool, service: str, limits: ServiceLimits) -> int:
    """Most tokens, prompt and output, that one request of a service can have."""
    return min(limits.context_tokens, pool.max_blocks(service) * pool.block_size)


def check_request(request: Request, services: Mapping[str, ServiceLimits], pool: BlockPool) -> int:
    """The most output tokens that the request's prompt leaves room for.

    Raises:
        InvalidRequest: it can never be served as asked.
    """
    limits = services.get(request.service)
    if limits is None:
        raise InvalidRequest(
            f"model {request.service!r} is not served here;"
            f" possible are {', '.join(sorted(services)) or 'none'}",
            param="model",
            code="model_not_found",
        )
    length = len(request.prompt)
    if length == 0:
        raise InvalidRequest("the prompt is empty; it needs at least one token", param="prompt")
    total = longest_total(pool, request.service, limits)
    why = f"model {request.service!r} has room for {total} tokens, prompt and output together"
    if total < limits.context_tokens:
        why += f" (its context is {limits.context_tokens}, but the KV cache holds no more)"
    if length + 1 > total:
        raise InvalidRequest(
            f"the prompt has {length} tokens, but {why}; at most {total - 1} leave room for an answer",
            param="prompt",
            code="context_length_exceeded",
        )
    most_tokens = total - length
    _check_output(request, most_tokens, why)
    for name in ("max_tokens", "min_tokens"):
        asked = getattr(request.sampling, name)
        if asked is not None and asked > most_tokens:
            raise InvalidRequest(
                f"{name} is {asked}, but {why}; with this prompt of {length} it can be at most {most_tokens}",
                param=name,
                code="context_length_exceeded",
            )
    return most_tokens


def _check_output(request: Request, most_tokens: int, why: str) -> None:
    """Refuse a resumed request that this engine cannot bring to its end, or whose output is not its own."""
    output, resumed, length = request.output_tokens, request.resume_state, len(request.prompt)
    if isinstance(request.prompt, SyntheticPrompt) != isinstance(output, int) and output != ():
        raise InvalidRequest(
            "output_tokens must be token ids where the prompt is, and a number where the prompt is synthetic",
            param="output_tokens",
        )
    if resumed is not None and resumed.max_new_tokens > most_tokens:
        raise InvalidRequest(
            f"the request was promised up to {resumed.max_new_tokens} output tokens, but {why}; "
            f"with this prompt of {length} it can have at most {most_tokens} here",
            param="max_tokens",
            code="context_length_exceeded",
        )
    most = most_new_tokens(request, most_tokens)
    if request.num_output_tokens > most:
        raise InvalidRequest(
            f"output_tokens has {request.num_output_tokens} tokens, but the request can have at most {most}",
            param="output_tokens",
        )
