"""The async methods of ``Shoal``: agenerate, achat, astream, aembed."""

from asyncio import to_thread
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from shoal.core import SLO
from shoal.frontend.offline_arguments import (
    CallArguments,
    CallBuilder,
    Message,
    PromptInput,
    SamplingInput,
    embeddings_of,
    only_call,
)
from shoal.frontend.offline_batch import RequestOutput
from shoal.frontend.offline_runner import OfflineRunner, require_success


class AsyncCalls:
    """Async versions of the methods of ``Shoal``, with the same arguments.

    Their requests are batched with all others, and are cancelled with the task.
    """

    _calls: CallBuilder
    _runner: OfflineRunner

    async def agenerate(
        self,
        prompts: PromptInput | Sequence[PromptInput],
        sampling: SamplingInput | Sequence[SamplingInput] | None = None,
        service: str | Sequence[str] | None = None,
        slo: SLO | Sequence[SLO] | None = None,
        output_tokens: Sequence[Sequence[int]] | None = None,
        **parameters: Any,
    ) -> list[RequestOutput]:
        """``generate`` without a progress bar."""
        arguments = CallArguments(
            service=service, sampling=sampling, parameters=parameters, slo=slo, output_tokens=output_tokens
        )
        return await self._runner.run_async(await to_thread(self._calls.complete, prompts, arguments))

    async def achat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling: SamplingInput | Sequence[SamplingInput] | None = None,
        service: str | Sequence[str] | None = None,
        slo: SLO | Sequence[SLO] | None = None,
        **parameters: Any,
    ) -> list[RequestOutput]:
        """``chat`` without a progress bar."""
        arguments = CallArguments(service=service, sampling=sampling, parameters=parameters, slo=slo)
        return await self._runner.run_async(await to_thread(self._calls.chat, messages, arguments))

    def astream(
        self,
        prompt: PromptInput,
        sampling: SamplingInput | None = None,
        service: str | None = None,
        slo: SLO | None = None,
        **parameters: Any,
    ) -> AsyncGenerator[str, None]:
        """``stream`` as an async generator: ``async for piece in shoal.astream(...)``.

        Errors in the arguments are raised by the first iteration.
        """
        arguments = CallArguments(service=service, sampling=sampling, parameters=parameters, slo=slo)
        return self._runner.stream_async(lambda: only_call(self._calls.complete(prompt, arguments)))

    def astream_chat(
        self,
        messages: Sequence[Message],
        sampling: SamplingInput | None = None,
        service: str | None = None,
        slo: SLO | None = None,
        **parameters: Any,
    ) -> AsyncGenerator[str, None]:
        arguments = CallArguments(service=service, sampling=sampling, parameters=parameters, slo=slo)
        return self._runner.stream_async(lambda: only_call(self._calls.chat(messages, arguments)))

    async def aembed(
        self,
        texts: PromptInput | Sequence[PromptInput],
        service: str | Sequence[str] | None = None,
        truncate_prompt_tokens: int | None = None,
    ) -> list[tuple[float, ...]]:
        calls = await to_thread(self._calls.embed, texts, service, truncate_prompt_tokens)
        outputs = await self._runner.run_async(calls)
        require_success(outputs)
        return embeddings_of(outputs)
