"""Check of a request on the client's side, before it is sent: lengths, token ids, SLOs, priority."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from shoal.core import SLO, InvalidRequest, SamplingParams, slo_problem
from shoal.core.errors import model_not_found
from shoal.core.service import NO_GOALS
from shoal.engine.info import ServiceInfo

_NEED_A_MODEL: Mapping[str, object] = {
    name: SamplingParams.__dataclass_fields__[name].default
    for name in (
        "grammar",
        "logprobs",
        "prompt_logprobs",
        "embed",
        "logit_bias",
        "allowed_token_ids",
        "banned_sequences",
    )
}
"""Sampling parameters that simulated engines refuse, with the value of a request without them."""


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
    if limits.simulated:
        _check_simulated(sampling)
    _check_tokens(limits, service, prompt, "prompt")
    _check_tokens(limits, service, output, "output_tokens")
    for name, tokens in _sampled_tokens(sampling).items():
        _check_tokens(limits, service, tokens, name)
    if found := slo_problem(slo, limits.execution_s):
        goal, why = found
        raise InvalidRequest(f"slo.{goal} {why}", param=f"slo.{goal}")
    limits.lengths(service).check(len(prompt), sampling, len(output))


def _check_simulated(sampling: SamplingParams) -> None:
    """Raise InvalidRequest for a parameter that asks for what only a model has: logits, or hidden states."""
    for name, plain in _NEED_A_MODEL.items():
        if getattr(sampling, name) != plain:
            raise InvalidRequest(
                f"{name} is not possible here: the engines are simulated, so no model computes the tokens",
                param=name,
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
        raise model_not_found(service, info.services)
    return limits


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
