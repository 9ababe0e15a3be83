"""First check of a request, on the client's side: lengths, token ids, SLOs, priority, over all engines."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from shoal.core import SLO, InvalidRequest, SamplingParams, slo_problem
from shoal.core.service import NO_GOALS
from shoal.engine.info import ServiceInfo


class Limits(Protocol):
    """Limits of one engine, or of several that serve together."""

    @property
    def services(self) -> Mapping[str, ServiceInfo]: ...

    @property
    def takes_priorities(self) -> bool:
        """Whether the scheduling order reads ``Request.priority``."""


def check_request(
    info: Limits,
    service: str,
    prompt: Sequence[int],
    sampling: SamplingParams,
    slo: SLO = NO_GOALS,
    output: Sequence[int] = (),
) -> None:
    """Raise InvalidRequest for a request that can never be served.

    output: its earlier output.
    """
    limits = find_service(info, service)
    if not prompt:
        raise InvalidRequest("the prompt is empty; it must have at least one token", param="prompt")
    _check_tokens(limits, service, prompt, "prompt")
    _check_tokens(limits, service, output, "output_tokens")
    for name, tokens in _sampled_tokens(sampling).items():
        _check_tokens(limits, service, tokens, name)
    if found := slo_problem(slo, limits.execution_s):
        goal, why = found
        raise InvalidRequest(f"slo.{goal} {why}", param=f"slo.{goal}")
    _check_length(limits, service, len(prompt), sampling)
    room = limits.max_total_tokens - len(prompt)
    most = room if sampling.max_tokens is None else sampling.max_tokens
    if len(output) > most:
        raise InvalidRequest(
            f"output_tokens has {len(output)} tokens, but the request can have at most {most}",
            param="output_tokens",
        )


def check_priority(info: Limits, priority: int) -> None:
    """Raise InvalidRequest for a priority that the scheduling order does not read."""
    if priority and not info.takes_priorities:
        raise InvalidRequest(
            f"priority must be 0, got {priority}: the server's scheduler does not look at priorities, "
            "unless scheduler.order is priority",
            param="priority",
        )


def _sampled_tokens(sampling: SamplingParams) -> dict[str, Sequence[int]]:
    """Token ids in the sampling parameters, by parameter."""
    return {
        "stop_token_ids": sampling.stop_token_ids,
        "logit_bias": [token for token, _ in sampling.logit_bias],
        "allowed_token_ids": sampling.allowed_token_ids,
        "banned_sequences": [token for sequence in sampling.banned_sequences for token in sequence],
    }


def find_service(info: Limits, service: str) -> ServiceInfo:
    """The limits of ``service``; raises InvalidRequest if it is unknown."""
    limits = info.services.get(service)
    if limits is None:
        names = ", ".join(sorted(info.services))
        raise InvalidRequest(
            f"model {service!r} is not served here; available: {names}", param="model", code="model_not_found"
        )
    return limits


def check_prompt_length(limits: ServiceInfo, service: str, tokens: int, at_least: bool = False) -> None:
    """Raise InvalidRequest for a prompt that leaves no room for output.

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


def most_prompt_tokens(
    limits: ServiceInfo, truncate_prompt_tokens: int | None, output_tokens: int
) -> int | None:
    """Maximum tokens to keep of a prompt, from its end; None: all. Raises InvalidRequest.

    truncate_prompt_tokens: of the request; -1: as many as leave room for ``output_tokens``.
    """
    if truncate_prompt_tokens == -1:  # a prompt without room for output is rejected later
        return max(1, limits.max_total_tokens - output_tokens)
    if truncate_prompt_tokens is not None and truncate_prompt_tokens < 1:
        raise InvalidRequest(
            f"truncate_prompt_tokens must be at least 1, or -1, got {truncate_prompt_tokens}",
            param="truncate_prompt_tokens",
        )
    return truncate_prompt_tokens


def _check_tokens(limits: ServiceInfo, service: str, tokens: Sequence[int], name: str) -> None:
    if tokens and (min(tokens) < 0 or max(tokens) >= limits.vocab_size):
        wrong = next(token for token in tokens if not 0 <= token < limits.vocab_size)
        raise InvalidRequest(
            f"{name} token {wrong} is outside the vocabulary of {service}; "
            f"token ids go from 0 to {limits.vocab_size - 1}",
            param=name,
        )


def _check_length(limits: ServiceInfo, service: str, prompt: int, sampling: SamplingParams) -> None:
    check_prompt_length(limits, service, prompt)
    room = limits.max_total_tokens - prompt
    requested = sampling.max_tokens if sampling.max_tokens is not None else max(1, sampling.min_tokens)
    if requested <= room:
        return
    name = "max_tokens" if sampling.max_tokens is not None else "min_tokens"
    raise InvalidRequest(
        f"the prompt has {prompt} tokens and {name} asks for {requested}, {prompt + requested} together, "
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
