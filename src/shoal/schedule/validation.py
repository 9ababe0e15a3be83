"""Second check of a request, in the engine: what only it knows, such as its KV pool and resumed output."""

from collections.abc import Mapping
from dataclasses import dataclass

from shoal.core import NO_GOALS, SLO, InvalidRequest, Request, SyntheticPrompt
from shoal.kvcache import BlockPool
from shoal.schedule.request_state import resolve_max_new_tokens


@dataclass(frozen=True, slots=True)
class ServiceLimits:
    """Limits of a service's model, and options of the service.

    context_tokens: context length of the model. slo, execution_s, quota: as in ``Service``. weights: equal
    for services that share weights; None: it has its own.
    """

    context_tokens: int
    eos_token_ids: tuple[int, ...] = ()
    slo: SLO = NO_GOALS
    execution_s: float | None = None
    quota: int = 8
    weights: str | None = None


def max_total_tokens(pool: BlockPool, service: str, limits: ServiceLimits) -> int:
    """Limit on the length of a request, prompt and output, by the model's context and the KV cache."""
    return min(limits.context_tokens, pool.max_blocks(service) * pool.block_size)


def check_request(request: Request, services: Mapping[str, ServiceLimits], pool: BlockPool) -> int:
    """The number of output tokens for which there is room after the request's prompt.

    Raises:
        InvalidRequest: the request can never be served.
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
    total = max_total_tokens(pool, request.service, limits)
    why = f"model {request.service!r} has room for {total} tokens, prompt and output together"
    if total < limits.context_tokens:
        why += f" (its context is {limits.context_tokens}, but the KV cache holds no more)"
    if length + 1 > total:
        raise InvalidRequest(
            f"the prompt has {length} tokens, but {why}; at most {total - 1} leave room for an answer",
            param="prompt",
            code="context_length_exceeded",
        )
    max_output_tokens = total - length
    _check_output(request, max_output_tokens, why)
    for name in ("max_tokens", "min_tokens"):
        value = getattr(request.sampling, name)
        if value is not None and value > max_output_tokens:
            raise InvalidRequest(
                f"{name} is {value}, but {why}; "
                f"with this prompt of {length} it can be at most {max_output_tokens}",
                param=name,
                code="context_length_exceeded",
            )
    return max_output_tokens


def _check_output(request: Request, max_output_tokens: int, why: str) -> None:
    """Check the output of a resumed request, and whether this engine has room for the rest of it."""
    output, resumed, length = request.output_tokens, request.resume_state, len(request.prompt)
    if isinstance(request.prompt, SyntheticPrompt) != isinstance(output, int) and output != ():
        raise InvalidRequest(
            "output_tokens must be token ids where the prompt is, and a number where the prompt is synthetic",
            param="output_tokens",
        )
    if resumed is not None and resumed.max_new_tokens > max_output_tokens:
        raise InvalidRequest(
            f"the request was promised up to {resumed.max_new_tokens} output tokens, but {why}; "
            f"with this prompt of {length} it can have at most {max_output_tokens} here",
            param="max_tokens",
            code="context_length_exceeded",
        )
    most = resolve_max_new_tokens(request, max_output_tokens)
    if request.num_output_tokens > most:
        raise InvalidRequest(
            f"output_tokens has {request.num_output_tokens} tokens, but the request can have at most {most}",
            param="output_tokens",
        )
