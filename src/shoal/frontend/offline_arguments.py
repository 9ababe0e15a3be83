"""Converts arguments of the offline API into validated calls: prompts, services, sampling, SLOs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any, TypeVar

from shoal.core import SLO, InvalidRequest, SamplingDefaults, SamplingParams
from shoal.core.service import NO_GOALS
from shoal.engine.info import EngineInfo
from shoal.frontend.offline_batch import EMBEDDING_SAMPLING, RequestOutput
from shoal.frontend.validation import check_request, find_service, most_prompt_tokens
from shoal.models import Tokenizer

PromptInput = str | Sequence[int]
Message = Mapping[str, Any]
SamplingInput = SamplingParams | Mapping[str, Any]

T = TypeVar("T", str, SamplingInput, SLO)


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One validated prompt."""

    prompt: PromptInput
    """As it was passed."""
    service: str
    tokens: Sequence[int]
    sampling: SamplingParams
    """Completed by the service's defaults."""
    slo: SLO = NO_GOALS
    output: Sequence[int] = ()
    """Earlier output to continue."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallArguments:
    """All arguments but the prompts, as they were passed: one value for all prompts, or one for each."""

    service: str | Sequence[str] | None = None
    """None: the only service."""
    sampling: SamplingInput | Sequence[SamplingInput] | None = None
    """Sampling parameters; excludes ``parameters``."""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    """Single sampling parameters by name, for all prompts."""
    slo: SLO | Sequence[SLO] | None = None
    output_tokens: Sequence[Sequence[int]] | None = None
    """Earlier output of each prompt, to continue."""


class CallBuilder:
    """Builds calls for the services of an engine; raises InvalidRequest if one cannot be served."""

    def __init__(
        self, info: EngineInfo, tokenizers: Mapping[str, Tokenizer], defaults: Mapping[str, SamplingDefaults]
    ) -> None:
        self._info = info
        self._tokenizers = tokenizers
        self._defaults = defaults

    def complete(self, prompts: PromptInput | Sequence[PromptInput], arguments: CallArguments) -> list[Call]:
        """Calls that complete one text or token-id list, or many."""
        many = _as_list(prompts)
        names = self._services_of(arguments.service, len(many))
        encoded = [self._encode(prompt, name) for prompt, name in zip(many, names, strict=True)]
        return self._calls(many, encoded, names, arguments)

    def chat(
        self, messages: Sequence[Message] | Sequence[Sequence[Message]], arguments: CallArguments
    ) -> list[Call]:
        """Calls that continue one conversation, or many."""
        conversations = _as_conversations(messages)
        names = self._services_of(arguments.service, len(conversations))
        encoded = [
            self._tokenizers[name].apply_chat_template(conversation)
            for name, conversation in zip(names, conversations, strict=True)
        ]
        return self._calls(encoded, encoded, names, arguments)

    def embed(
        self,
        texts: PromptInput | Sequence[PromptInput],
        service: str | Sequence[str] | None,
        truncate_prompt_tokens: int | None,
    ) -> list[Call]:
        """Calls for the embeddings of one text or token-id list, or many.

        truncate_prompt_tokens: as in ``most_prompt_tokens``.
        """
        many = _as_list(texts)
        names = self._services_of(service, len(many))
        encoded = []
        for text, name in zip(many, names, strict=True):
            most = most_prompt_tokens(self._info.services[name], truncate_prompt_tokens, 1)
            tokens = self._encode(text, name)
            encoded.append(tokens if most is None else tokens[-most:])
        return self._calls(many, encoded, names, CallArguments(sampling=EMBEDDING_SAMPLING))

    def _encode(self, prompt: PromptInput, service: str) -> list[int]:
        return self._tokenizers[service].encode(prompt) if isinstance(prompt, str) else list(prompt)

    def _calls(
        self,
        prompts: Sequence[PromptInput],
        encoded: Sequence[Sequence[int]],
        names: Sequence[str],
        arguments: CallArguments,
    ) -> list[Call]:
        sampling = self._sampling_of(names, arguments)
        goals = _one_each(arguments.slo or NO_GOALS, len(encoded), "slo")
        outputs = _output_of_each(arguments.output_tokens, sampling)
        calls = [
            Call(prompt=prompt, service=name, tokens=tokens, sampling=params, slo=slo, output=output)
            for prompt, name, tokens, params, slo, output in zip(
                prompts, names, encoded, sampling, goals, outputs, strict=True
            )
        ]
        for call in calls:
            check_request(self._info, call.service, call.tokens, call.sampling, call.slo, call.output)
        return calls

    def _sampling_of(self, names: Sequence[str], arguments: CallArguments) -> list[SamplingParams]:
        """Sampling parameters of each prompt, completed by its service's defaults."""
        if arguments.sampling is not None and arguments.parameters:
            raise InvalidRequest(
                f"sampling= and parameters by name ({', '.join(arguments.parameters)}) were both given; "
                "give all of them in one of the two ways",
                "sampling",
            )
        each = _one_each(arguments.sampling or arguments.parameters, len(names), "sampling")
        return [
            own if isinstance(own, SamplingParams) else self._defaults[name].params(own)
            for name, own in zip(names, each, strict=True)
        ]

    def _services_of(self, service: str | Sequence[str] | None, count: int) -> Sequence[str]:
        if service is None:
            if len(self._info.services) > 1:
                names = ", ".join(sorted(self._info.services))
                raise InvalidRequest(f"several services run here; pass service= one of {names}", "service")
            service = next(iter(self._info.services))
        names_of_prompts = _one_each(service, count, "service")
        for name in names_of_prompts:
            find_service(self._info, name)
        return names_of_prompts


def only_call(calls: Sequence[Call]) -> Call:
    """The only call, for a stream; raises InvalidRequest for several prompts or completions."""
    if len(calls) != 1:
        raise InvalidRequest(f"a stream is of one prompt, but {len(calls)} were given", "prompts")
    if calls[0].sampling.n > 1:
        raise InvalidRequest(f"a stream is of one completion, but n is {calls[0].sampling.n}; use n=1", "n")
    return calls[0]


def embeddings_of(outputs: Sequence[RequestOutput]) -> list[tuple[float, ...]]:
    """The embeddings in the outputs of calls of ``CallBuilder.embed``."""
    return [output.outputs[0].embedding or () for output in outputs]


def _as_list(prompts: PromptInput | Sequence[PromptInput]) -> list[PromptInput]:
    """A list of prompts, from one or many."""
    if isinstance(prompts, str):
        return [prompts]
    single = [int(token) for token in prompts if isinstance(token, Integral)]
    if single and len(single) == len(prompts):
        return [single]
    many = [prompt for prompt in prompts if isinstance(prompt, Sequence)]
    if len(many) != len(prompts):
        raise InvalidRequest(
            "prompts must be texts or lists of token ids, one or many, but not a mixture", "prompts"
        )
    return many


def _as_conversations(
    messages: Sequence[Message] | Sequence[Sequence[Message]],
) -> list[Sequence[Message]]:
    """A list of conversations, from one or many."""
    single = [message for message in messages if isinstance(message, Mapping)]
    if single and len(single) == len(messages):
        return [single]
    many = [conversation for conversation in messages if not isinstance(conversation, Mapping)]
    if len(many) != len(messages):
        raise InvalidRequest("messages must be one conversation or many, but not a mixture", "messages")
    return many


def _output_of_each(
    output_tokens: Sequence[Sequence[int]] | None, sampling: Sequence[SamplingParams]
) -> Sequence[Sequence[int]]:
    """Earlier output of each prompt; raises InvalidRequest."""
    if output_tokens is None:
        return [()] * len(sampling)
    if len(output_tokens) != len(sampling):
        raise InvalidRequest(
            f"output_tokens has {len(output_tokens)} lists for {len(sampling)} prompts; pass one for each",
            "output_tokens",
        )
    for output, params in zip(output_tokens, sampling, strict=True):
        if output and params.n > 1:
            raise InvalidRequest(
                f"output to go on from is that of one completion, but n is {params.n}; use n=1", "n"
            )
    return output_tokens


def _one_each(value: T | Sequence[T], count: int, name: str) -> Sequence[T]:
    """One value for each of ``count`` prompts: ``value`` repeated, or its elements."""
    if isinstance(value, str | SamplingParams | Mapping | SLO):
        return [value] * count
    if len(value) != count:
        raise InvalidRequest(
            f"{name} has {len(value)} values for {count} prompts; pass one, or one for each", name
        )
    return value
