"""The offline interface for coroutines."""

from asyncio import to_thread
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from shoal.core import SLO
from shoal.frontend.offline_arguments import (
    Asked,
    CallMaker,
    Message,
    PromptInput,
    SamplingInput,
    embeddings_of,
    only_call,
)
from shoal.frontend.offline_batch import RequestOutput
from shoal.frontend.offline_runner import Runner, require_success


class AsyncCalls:
    """What a Shoal does for coroutines, in the words of its other methods.

    Their requests share the steps of the engine with all others, and are cancelled with the task.
    """

    _calls: CallMaker
    _runner: Runner

    async def agenerate(
        self,
        prompts: PromptInput | Sequence[PromptInput],
        sampling: SamplingInput | Sequence[SamplingInput] | None = None,
        service: str | Sequence[str] | None = None,
        slo: SLO | Sequence[SLO] | None = None,
        output_tokens: Sequence[Sequence[int]] | None = None,
        **parameters: Any,
    ) -> list[RequestOutput]:
        """``generate`` for coroutines, without a bar."""
        asked = Asked(
            service=service, sampling=sampling, parameters=parameters, slo=slo, output_tokens=output_tokens
        )
        return await self._runner.run_async(await to_thread(self._calls.complete, prompts, asked))

    async def achat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling: SamplingInput | Sequence[SamplingInput] | None = None,
        service: str | Sequence[str] | None = None,
        slo: SLO | Sequence[SLO] | None = None,
        **parameters: Any,
    ) -> list[RequestOutput]:
        """``chat`` for coroutines, without a bar."""
        asked = Asked(service=service, sampling=sampling, parameters=parameters, slo=slo)
        return await self._runner.run_async(await to_thread(self._calls.chat, messages, asked))

    def astream(
        self,
        prompt: PromptInput,
        sampling: SamplingInput | None = None,
        service: str | None = None,
        slo: SLO | None = None,
        **parameters: Any,
    ) -> AsyncGenerator[str, None]:
        """``stream`` for coroutines: ``async for piece in shoal.astream(...)``.

        What is wrong with the arguments is raised with the first piece.
        """
        asked = Asked(service=service, sampling=sampling, parameters=parameters, slo=slo)
        return self._runner.stream_async(lambda: only_call(self._calls.complete(prompt, asked)))

    def astream_chat(
        self,
        messages: Sequence[Message],
        sampling: SamplingInput | None = None,
        service: str | None = None,
        slo: SLO | None = None,
        **parameters: Any,
    ) -> AsyncGenerator[str, None]:
        """``stream_chat`` for coroutines."""
        asked = Asked(service=service, sampling=sampling, parameters=parameters, slo=slo)
        return self._runner.stream_async(lambda: only_call(self._calls.chat(messages, asked)))

    async def aembed(
        self,
        texts: PromptInput | Sequence[PromptInput],
        service: str | Sequence[str] | None = None,
        truncate_prompt_tokens: int | None = None,
    ) -> list[tuple[float, ...]]:
        """``embed`` for coroutines."""
        calls = await to_thread(self._calls.embed, texts, service, truncate_prompt_tokens)
        outputs = await self._runner.run_async(calls)
        require_success(outputs)
        return embeddings_of(outputs)
