"""The offline interface: models in this process."""

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from numbers import Integral
from types import TracebackType
from typing import Any, Self, TypeVar

import tokenizers

from shoal.core import SLO, ConfigError, InvalidRequest, SamplingParams, Service
from shoal.engine.batch import Batch, RequestOutput
from shoal.engine.build import build_engine
from shoal.engine.options import EngineOptions
from shoal.engine.progress import LoadProgress
from shoal.engine.sampling import with_sampling_defaults
from shoal.engine.stats import EngineStats
from shoal.engine.validation import check_request, find_service
from shoal.execute.grammar_pool import MAX_PROCESSES
from shoal.kvcache.options import KVCacheOptions
from shoal.models import Tokenizer, resolve_model
from shoal.schedule.options import SchedulerOptions

PromptInput = str | Sequence[int]
Message = Mapping[str, Any]
SamplingInput = SamplingParams | Mapping[str, Any]

T = TypeVar("T", str, SamplingInput, SLO)


class Shoal:
    """Several models in this process, sharing one KV pool and one stream of iterations.

    >>> with Shoal("smollm2") as shoal:
    ...     [output] = shoal.generate("The capital of France is", {"max_tokens": 8})
    ...     print(output.text)

    services: Service values, or models by name, path or hub id, which then are services of that name.
    threads: CPU threads; None takes every core. progress: show loading on the terminal.
    Raises ConfigError, ModelUnavailable or ModelUnsupported.
    """

    def __init__(
        self,
        services: str | Service | Sequence[str | Service],
        *,
        kv_cache: KVCacheOptions | None = None,
        scheduler: SchedulerOptions | None = None,
        device: str = "cpu",
        threads: int | None = None,
        attention: str = "auto",
        progress: bool = True,
    ) -> None:
        named = [services] if isinstance(services, str | Service) else services
        self.options = EngineOptions(
            services=tuple(Service(name=s, model=s) if isinstance(s, str) else s for s in named),
            kv_cache=kv_cache or KVCacheOptions(),
            scheduler=scheduler or SchedulerOptions(),
            device=device,
            threads=threads,
            attention=attention,
        )
        with LoadProgress(shown=progress) as loading:
            folders = {s.name: resolve_model(s.model, loading.fetching) for s in self.options.services}
            services_in_effect = with_sampling_defaults(self.options.services, folders)
            self.options = replace(self.options, services=services_in_effect)
            loaded: dict[str, tokenizers.Tokenizer] = {}
            self.tokenizers = {
                s.name: Tokenizer.from_folder(folders[s.name], s.chat_template, loaded)
                for s in self.options.services
            }
            self._engine, self.info = build_engine(self.options, folders, progress=loading.doing)
        self._lock = threading.Lock()
        self._closed = False

    def generate(
        self,
        prompts: PromptInput | Sequence[PromptInput],
        sampling: SamplingInput | Sequence[SamplingInput] | None = None,
        service: str | Sequence[str] | None = None,
        progress: bool = True,
        slo: SLO | Sequence[SLO] | None = None,
        output_tokens: Sequence[Sequence[int]] | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts; one output each, in their order, with ``n`` completions inside.

        prompts: one text or token-id list, or many. sampling, service, slo: one for all, or one for each;
        service may be left out where there is only one, and goals left out of slo are the service's. A
        mapping of sampling parameters is completed by the service's defaults; SamplingParams are used as they
        are. progress: a bar on standard error, if that is a terminal. output_tokens: output to go on from, of
        each prompt: with the same seed it goes on as if it had not been interrupted, and is part of what is
        returned (without log-probabilities). Raises InvalidRequest before anything runs if one of the prompts
        cannot be served. Ctrl-C cancels everything and raises KeyboardInterrupt.
        """
        many = _as_many(prompts)
        names = self._services_of(service, len(many))
        encoded = [
            self.tokenizers[name].encode(prompt) if isinstance(prompt, str) else list(prompt)
            for name, prompt in zip(names, many, strict=True)
        ]
        return self._run(many, encoded, names, sampling, slo, progress, output_tokens)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling: SamplingInput | Sequence[SamplingInput] | None = None,
        service: str | Sequence[str] | None = None,
        progress: bool = True,
        slo: SLO | Sequence[SLO] | None = None,
    ) -> list[RequestOutput]:
        """Continue conversations: one list of ``{"role": ..., "content": ...}``, or many.

        Everything else is as in ``generate``. Raises InvalidRequest for a model without chat template.
        """
        conversations = _as_conversations(messages)
        names = self._services_of(service, len(conversations))
        encoded = [
            self.tokenizers[name].apply_chat_template(conversation)
            for name, conversation in zip(names, conversations, strict=True)
        ]
        return self._run(encoded, encoded, names, sampling, slo, progress)

    def stats(self) -> EngineStats:
        """Counters since the start, and the present state of the memory."""
        return self._engine.stats()

    def close(self) -> None:
        """Release the models; closing twice does nothing."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _run(
        self,
        prompts: Sequence[PromptInput],
        encoded: Sequence[Sequence[int]],
        names: Sequence[str],
        sampling: SamplingInput | Sequence[SamplingInput] | None,
        slo: SLO | Sequence[SLO] | None,
        progress: bool,
        output_tokens: Sequence[Sequence[int]] | None = None,
    ) -> list[RequestOutput]:
        defaults = {service.name: service.sampling for service in self.options.services}
        wanted = [
            own if isinstance(own, SamplingParams) else defaults[name].params(own)
            for name, own in zip(names, _one_each(sampling or {}, len(encoded), "sampling"), strict=True)
        ]
        goals = _one_each(slo or SLO(), len(encoded), "slo")
        outputs = _outputs_of(output_tokens, wanted)
        calls = list(zip(names, encoded, wanted, goals, outputs, strict=True))
        for name, tokens, params, own, output in calls:
            check_request(self.info, name, tokens, params, own, output)
        with self._lock:
            if self._closed:
                raise ConfigError("this Shoal is closed; make a new one to generate")
            batch = Batch(self._engine, progress=progress)
            with self._prepared_grammars(names, wanted):
                try:
                    for prompt, (name, tokens, params, own, output) in zip(prompts, calls, strict=True):
                        eos = self.info.services[name].eos_token_ids
                        batch.add(prompt, name, tokens, params, self.tokenizers[name], own, output, eos)
                except BaseException:
                    batch.cancel()
                    raise
            return batch.run()

    @contextmanager
    def _prepared_grammars(self, names: Sequence[str], wanted: Sequence[SamplingParams]) -> Iterator[None]:
        """Keep places for grammars; raises InvalidRequest if one cannot be used, or there are too many."""
        grammars = {
            (name, params.grammar)
            for name, params in zip(names, wanted, strict=True)
            if params.grammar is not None
        }
        if len(grammars) > MAX_PROCESSES:
            raise InvalidRequest(
                f"{len(grammars)} different grammars in one call, at most {MAX_PROCESSES} may be; split it",
                "grammar",
            )
        with ExitStack() as stack:
            leases = []
            for name, grammar in grammars:
                leases.append(self._engine.prepare(name, grammar))
                stack.callback(leases[-1].release)
            for lease in leases:
                lease.ready.result()
            yield

    def _services_of(self, service: str | Sequence[str] | None, count: int) -> Sequence[str]:
        if service is None:
            if len(self.info.services) > 1:
                names = ", ".join(sorted(self.info.services))
                raise InvalidRequest(f"several services run here; pass service= one of {names}", "service")
            service = next(iter(self.info.services))
        names_of_prompts = _one_each(service, count, "service")
        for name in names_of_prompts:
            find_service(self.info, name)
        return names_of_prompts


def _as_many(prompts: PromptInput | Sequence[PromptInput]) -> list[PromptInput]:
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


def _outputs_of(
    output_tokens: Sequence[Sequence[int]] | None, wanted: Sequence[SamplingParams]
) -> Sequence[Sequence[int]]:
    """Output to go on from, of each prompt."""
    if output_tokens is None:
        return [()] * len(wanted)
    if len(output_tokens) != len(wanted):
        raise InvalidRequest(
            f"output_tokens has {len(output_tokens)} lists for {len(wanted)} prompts; pass one for each",
            "output_tokens",
        )
    for output, params in zip(output_tokens, wanted, strict=True):
        if output and params.n > 1:
            raise InvalidRequest(
                f"output to go on from is that of one completion, but n is {params.n}; use n=1", "n"
            )
    return output_tokens


def _one_each(value: T | Sequence[T], count: int, name: str) -> Sequence[T]:
    """``value`` repeated, or its values if there is one for each of ``count`` prompts."""
    if isinstance(value, str | SamplingParams | Mapping | SLO):
        return [value] * count
    if len(value) != count:
        raise InvalidRequest(
            f"{name} has {len(value)} values for {count} prompts; pass one, or one for each", name
        )
    return value
