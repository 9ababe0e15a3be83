"""Checks of a request before it goes to an engine; the same offline and behind HTTP."""

from collections.abc import Sequence

from shoal.core import SLO, InvalidRequest, SamplingParams, slo_problem
from shoal.core.service import NO_GOALS
from shoal.engine.info import EngineInfo, ServiceInfo


def check_request(
    info: EngineInfo, service: str, prompt: Sequence[int], sampling: SamplingParams, slo: SLO = NO_GOALS
) -> None:
    """Reject a request that could never be served as asked; raises InvalidRequest."""
    limits = find_service(info, service)
    if not prompt:
        raise InvalidRequest("the prompt is empty; it must have at least one token", param="prompt")
    if min(prompt) < 0 or max(prompt) >= limits.vocab_size:
        wrong = next(token for token in prompt if not 0 <= token < limits.vocab_size)
        raise InvalidRequest(
            f"prompt token {wrong} is outside the vocabulary of {service}; "
            f"token ids go from 0 to {limits.vocab_size - 1}",
            param="prompt",
        )
    for token in sampling.stop_token_ids:
        if token >= limits.vocab_size:
            raise InvalidRequest(
                f"stop token {token} is outside the vocabulary of {service}; "
                f"token ids go from 0 to {limits.vocab_size - 1}",
                param="stop_token_ids",
            )
    if found := slo_problem(slo, limits.execution_s):
        goal, why = found
        raise InvalidRequest(f"slo.{goal} {why}", param=f"slo.{goal}")
    _check_length(limits, service, len(prompt), sampling)


def find_service(info: EngineInfo, service: str) -> ServiceInfo:
    """The limits of ``service``; raises an InvalidRequest with the known names if it is unknown."""
    limits = info.services.get(service)
    if limits is None:
        names = ", ".join(sorted(info.services))
        raise InvalidRequest(
            f"model {service!r} is not served here; available: {names}", param="model", code="model_not_found"
        )
    return limits


def check_prompt_length(limits: ServiceInfo, service: str, tokens: int, at_least: bool = False) -> None:
    """Reject a prompt that leaves no room for output; raises InvalidRequest.

    at_least: ``tokens`` is only a lower bound of the prompt's length.
    """
    most = limits.max_total_tokens - 1
    if tokens > most:
        raise InvalidRequest(
            f"the prompt has {'at least ' if at_least else ''}{tokens} tokens, "
            f"but {_limit(limits, service)}; shorten the prompt to at most {most} tokens",
            param="prompt",
            code="context_length_exceeded",
        )


def _check_length(limits: ServiceInfo, service: str, prompt: int, sampling: SamplingParams) -> None:
    check_prompt_length(limits, service, prompt)
    room = limits.max_total_tokens - prompt
    asked = sampling.max_tokens if sampling.max_tokens is not None else max(1, sampling.min_tokens)
    if asked <= room:
        return
    name = "max_tokens" if sampling.max_tokens is not None else "min_tokens"
    raise InvalidRequest(
        f"the prompt has {prompt} tokens and {name} asks for {asked}, {prompt + asked} together, "
        f"but {_limit(limits, service)}; ask for at most {room} tokens or shorten the prompt",
        param=name,
        code="context_length_exceeded",
    )


def _limit(limits: ServiceInfo, service: str) -> str:
    return (
        f"{service} takes {limits.max_total_tokens} tokens of prompt and output together ({_reason(limits)})"
    )


def _reason(limits: ServiceInfo) -> str:
    if limits.max_total_tokens < limits.context_tokens:
        return "all that the KV memory can hold; give kv_cache.memory more for longer requests"
    return "its context length"
