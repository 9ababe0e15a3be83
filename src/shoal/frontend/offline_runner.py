"""OfflineRunner: runs offline calls to their ends or as streams, for threads and for coroutines."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from queue import SimpleQueue

from shoal.core import FinishReason, InvalidRequest, ShoalError, SLOExpired
from shoal.engine.core import Engine
from shoal.engine.info import EngineInfo
from shoal.frontend.offline_arguments import Call
from shoal.frontend.offline_batch import OfflineBatch, RequestOutput
from shoal.frontend.offline_engine_thread import EngineThread
from shoal.frontend.reader import Delta
from shoal.models import Tokenizer


class OfflineRunner:
    """Runs calls on its engine; any number of threads and coroutines may use it at once.

    Its errors are those of ``EngineThread.run`` and ``OfflineBatch.prepare``.
    """

    def __init__(self, engine: Engine, info: EngineInfo, tokenizers: Mapping[str, Tokenizer]) -> None:
        self._engine = engine
        self._info = info
        self._tokenizers = tokenizers
        self.thread = EngineThread(engine)

    def run(
        self, calls: Sequence[Call], on_delta: Callable[[Delta], None] | None = None
    ) -> list[RequestOutput]:
        """The outputs of calls, in their order; Ctrl-C cancels them.

        on_delta: called with every delta, in the engine thread.
        """
        with self._begin(calls, on_delta) as (batch, grammars):
            for ready in grammars:
                ready.result()
            return self.thread.run(batch)

    def stream(self, call: Call) -> Generator[str, None, None]:
        """Yields the text of a call; closing the generator cancels it. Raises as ``require_success``."""
        pieces: SimpleQueue[str | Future[list[RequestOutput]]] = SimpleQueue()
        with self._begin([call], lambda delta: pieces.put(delta.text)) as (batch, grammars):
            for ready in grammars:
                ready.result()
            batch.done.add_done_callback(pieces.put)
            self.thread.submit(batch)
            while isinstance(piece := pieces.get(), str):
                if piece:
                    yield piece
            require_success(piece.result())

    async def run_async(self, calls: Sequence[Call]) -> list[RequestOutput]:
        """The outputs of calls, in their order; they are cancelled with the task."""
        with self._begin(calls) as (batch, grammars):
            await _wait_ready(grammars)
            self.thread.submit(batch)
            return await asyncio.wrap_future(batch.done)

    async def stream_async(self, make_call: Callable[[], Call]) -> AsyncGenerator[str, None]:
        """``stream`` as an async generator.

        make_call: called in another thread, as long prompts take a while.
        """
        call = await asyncio.to_thread(make_call)
        loop = asyncio.get_running_loop()
        pieces: asyncio.Queue[str | Future[list[RequestOutput]]] = asyncio.Queue()

        def put(piece: str | Future[list[RequestOutput]]) -> None:
            with suppress(RuntimeError):  # the loop was closed
                loop.call_soon_threadsafe(pieces.put_nowait, piece)

        with self._begin([call], lambda delta: put(delta.text)) as (batch, grammars):
            await _wait_ready(grammars)
            batch.done.add_done_callback(put)
            self.thread.submit(batch)
            while isinstance(piece := await pieces.get(), str):
                if piece:
                    yield piece
            require_success(piece.result())

    @contextmanager
    def _begin(
        self, calls: Sequence[Call], on_delta: Callable[[Delta], None] | None = None
    ) -> Iterator[tuple[OfflineBatch, Sequence[Future[None]]]]:
        """A batch of calls, and futures of its grammars; an unfinished batch is cancelled at the end."""
        batch = OfflineBatch(self._engine, on_delta)
        for call in calls:
            batch.add(
                call.prompt,
                call.service,
                call.tokens,
                call.sampling,
                self._tokenizers[call.service],
                call.slo,
                call.output,
                self._info.services[call.service].eos_token_ids,
            )
        try:
            yield batch, batch.prepare()
        except InvalidRequest:
            self.thread.require_open()  # a closed engine rejects all grammars
            raise
        finally:
            self.thread.cancel(batch)


async def _wait_ready(grammars: Sequence[Future[None]]) -> None:
    """Wait for grammars; their futures are not cancelled with the task."""
    for ready in grammars:
        await asyncio.shield(asyncio.wrap_future(ready))


def require_success(outputs: Sequence[RequestOutput]) -> None:
    """Raise the error of the first completion that failed.

    InvalidRequest: its parameters exclude every token; SLOExpired: it waited too long for its SLO;
    ShoalError: it failed.
    """
    for completion in [completion for output in outputs for completion in output.outputs]:
        error = completion.error or completion.finish_reason.value
        if completion.finish_reason is FinishReason.INVALID:
            raise InvalidRequest(error)
        if completion.finish_reason is FinishReason.REFUSED:
            raise SLOExpired(error, 0.0)
        if completion.finish_reason not in (FinishReason.STOP, FinishReason.LENGTH):
            raise ShoalError(f"the engine ended the request: {error}")
