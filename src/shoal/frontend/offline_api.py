"""``Shoal``: the offline API, which runs models in this process (generate, chat, stream, embed)."""

import weakref
from collections.abc import Generator, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import tokenizers

from shoal.core import SLO, ConfigError, Service
from shoal.core.units import parse_size
from shoal.engine.build import build_engine
from shoal.engine.options import EngineOptions
from shoal.engine.stats import EngineStats
from shoal.frontend.offline_arguments import (
    Call,
    CallArguments,
    CallBuilder,
    Message,
    PromptInput,
    SamplingInput,
    embeddings_of,
    only_call,
)
from shoal.frontend.offline_async_api import AsyncCalls
from shoal.frontend.offline_batch import RequestOutput
from shoal.frontend.offline_runner import OfflineRunner, require_success
from shoal.frontend.progress import LoadProgress, TokenProgress
from shoal.frontend.sampling_defaults import with_sampling_defaults
from shoal.kvcache.options import KVCacheOptions
from shoal.models import NoTokenizer, Tokenizer, has_tokenizer, resolve_service
from shoal.schedule.options import SchedulerOptions
from shoal.schedule.weights_options import WeightsOptions


class Shoal(AsyncCalls):
    """One or more models in this process, which share one KV pool and one engine.

    >>> with Shoal("smollm2", kv_memory="64MiB") as shoal:
    ...     [output] = shoal.generate("The capital of France is", max_tokens=8)
    ...     print(output.text)

    Any number of threads and coroutines may use one Shoal at once; their requests are batched together.

    services: Service values, or models by name, path or hub id, which is then also the service's name.
    kv_memory: size of the KV pool, in bytes or as in ``64MiB``, instead of ``kv_cache.memory_bytes``.
    weights: limit on the memory for weights; by default all stay there.
    threads: CPU threads; None: every core. progress: show loading on the terminal.
    Raises ConfigError, ModelUnavailable or ModelUnsupported.
    """

    def __init__(
        self,
        services: str | Service | Sequence[str | Service],
        *,
        kv_memory: int | str | None = None,
        kv_cache: KVCacheOptions | None = None,
        scheduler: SchedulerOptions | None = None,
        weights: WeightsOptions | None = None,
        device: str = "cpu",
        threads: int | None = None,
        attention: str = "auto",
        progress: bool = True,
    ) -> None:
        named = [services] if isinstance(services, str | Service) else services
        self.options = EngineOptions(
            services=tuple(Service(name=s, model=s) if isinstance(s, str) else s for s in named),
            kv_cache=_with_size(kv_cache or KVCacheOptions(), kv_memory),
            scheduler=scheduler or SchedulerOptions(),
            weights=weights or WeightsOptions(),
            device=device,
            threads=threads,
            attention=attention,
        )
        with LoadProgress(shown=progress) as loading:
            folders = {s.name: resolve_service(s, loading.fetching) for s in self.options.services}
            services_in_effect = with_sampling_defaults(self.options.services, folders)
            self.options = replace(self.options, services=services_in_effect)
            loaded: dict[str, tokenizers.Tokenizer] = {}
            self.tokenizers = {s.name: _tokenizer(s, folders[s.name], loaded) for s in self.options.services}
            self._engine, self.info = build_engine(self.options, folders, progress=loading.doing)
        defaults = {service.name: service.sampling for service in self.options.services}
        self._calls = CallBuilder(self.info, self.tokenizers, defaults)
        self._runner = OfflineRunner(self._engine, self.info, self.tokenizers)
        weakref.finalize(self, self._runner.thread.abandon)

    def generate(
        self,
        prompts: PromptInput | Sequence[PromptInput],
        sampling: SamplingInput | Sequence[SamplingInput] | None = None,
        service: str | Sequence[str] | None = None,
        progress: bool = True,
        slo: SLO | Sequence[SLO] | None = None,
        output_tokens: Sequence[Sequence[int]] | None = None,
        **parameters: Any,
    ) -> list[RequestOutput]:
        """Complete prompts; returns one output for each, in their order, with ``n`` completions.

        prompts: one text or token-id list, or many. sampling, service, slo: one for all, or one for each;
        service is optional if there is only one, and goals missing in slo are the service's. A mapping of
        sampling parameters is completed by the service's defaults; SamplingParams are used as they are.
        parameters: sampling parameters by name, for all prompts, instead of sampling. progress: show a bar on
        standard error, if that is a terminal. output_tokens: earlier output of each prompt, to continue: with
        the same seed the output is as if it had not been interrupted. It is part of the returned output
        (without log-probabilities).

        Raises InvalidRequest before anything runs if one of the prompts cannot be served, QueueFull if too
        many grammars are in use, EngineDied after an error of the engine, and ConfigError if the Shoal is
        closed before or during the call. Ctrl-C cancels the call and raises KeyboardInterrupt.
        """
        arguments = CallArguments(
            service=service, sampling=sampling, parameters=parameters, slo=slo, output_tokens=output_tokens
        )
        return self._run(self._calls.complete(prompts, arguments), progress)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling: SamplingInput | Sequence[SamplingInput] | None = None,
        service: str | Sequence[str] | None = None,
        progress: bool = True,
        slo: SLO | Sequence[SLO] | None = None,
        **parameters: Any,
    ) -> list[RequestOutput]:
        """Continue conversations: one list of ``{"role": ..., "content": ...}``, or many.

        Other arguments are as in ``generate``. Raises InvalidRequest for a model without chat template.
        """
        arguments = CallArguments(service=service, sampling=sampling, parameters=parameters, slo=slo)
        return self._run(self._calls.chat(messages, arguments), progress)

    def stream(
        self,
        prompt: PromptInput,
        sampling: SamplingInput | None = None,
        service: str | None = None,
        slo: SLO | None = None,
        **parameters: Any,
    ) -> Generator[str, None, None]:
        """Complete one prompt; yields its text in pieces, as it is generated.

        Arguments are as in ``generate``. The request starts with the first ``next``, and is cancelled when
        the iterator is closed or deleted. Raises as ``generate``, and InvalidRequest, SLOExpired or
        another ShoalError if the request fails while it runs.
        """
        arguments = CallArguments(service=service, sampling=sampling, parameters=parameters, slo=slo)
        return self._runner.stream(only_call(self._calls.complete(prompt, arguments)))

    def stream_chat(
        self,
        messages: Sequence[Message],
        sampling: SamplingInput | None = None,
        service: str | None = None,
        slo: SLO | None = None,
        **parameters: Any,
    ) -> Generator[str, None, None]:
        """Continue one conversation; yields its text as ``stream`` does."""
        arguments = CallArguments(service=service, sampling=sampling, parameters=parameters, slo=slo)
        return self._runner.stream(only_call(self._calls.chat(messages, arguments)))

    def embed(
        self,
        texts: PromptInput | Sequence[PromptInput],
        service: str | Sequence[str] | None = None,
        truncate_prompt_tokens: int | None = None,
    ) -> list[tuple[float, ...]]:
        """The embeddings of texts or token-id lists, one or many, normalized to length 1.

        They are the same as those of /v1/embeddings.

        truncate_prompt_tokens: maximum tokens, of which the last are kept; -1: as many as the model accepts;
        None: longer texts are an InvalidRequest. Raises as ``stream``.
        """
        outputs = self._run(self._calls.embed(texts, service, truncate_prompt_tokens), progress=False)
        require_success(outputs)
        return embeddings_of(outputs)

    def stats(self) -> EngineStats:
        """Counters since the start, and present memory usage."""
        return self._runner.thread.call(self._engine.stats)

    def close(self) -> None:
        """Release the models; running calls end with a ConfigError. Closing twice does nothing."""
        self._runner.thread.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _run(self, calls: Sequence[Call], progress: bool) -> list[RequestOutput]:
        with TokenProgress(sum(call.sampling.n for call in calls), shown=progress) as bar:
            return self._runner.run(
                calls, lambda delta: bar.advance(int(delta.finish is not None), len(delta.tokens))
            )


def _tokenizer(service: Service, folder: Path, loaded: dict[str, tokenizers.Tokenizer]) -> Tokenizer:
    """The model's tokenizer; a model with random weights may have none, and is then used with token ids."""
    if service.random_seed is not None and not has_tokenizer(folder):
        return NoTokenizer(folder)
    return Tokenizer.from_folder(folder, service.chat_template, loaded)


def _with_size(kv_cache: KVCacheOptions, kv_memory: int | str | None) -> KVCacheOptions:
    """Options with the pool size of ``kv_memory``; raises ConfigError."""
    if kv_memory is None:
        return kv_cache
    if kv_cache.memory_bytes is not None:
        raise ConfigError("kv_memory and kv_cache.memory_bytes both say how large the KV pool is; give one")
    try:
        memory_bytes = parse_size(kv_memory) if isinstance(kv_memory, str) else kv_memory
    except ValueError as error:
        raise ConfigError(f"kv_memory: {error}") from error
    if memory_bytes < 1:
        raise ConfigError(f"kv_memory must be at least 1 byte, got {kv_memory}")
    return replace(kv_cache, memory_bytes=memory_bytes)
