"""The tokenizers of all services: each encodes in its own process, and decodes in the server.

In the server's process, reading a tokenizer or encoding megabytes of text would stall streams for seconds.
"""

import asyncio
import pickle
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import TypeVar

from anyio import to_thread

from shoal.core import InvalidRequest, ModelUnavailable, ServiceUnavailable
from shoal.models import TokenizerDescription, Vocabulary, digest_of
from shoal.models.chat_template.template import ChatTemplate
from shoal.models.tokenizer.messages import (
    SHORT_BYTES,
    Decode,
    Decoded,
    Encode,
    Encoded,
    Failed,
    Load,
    Loaded,
    Tokenize,
    Tokenized,
    TokenizerRequest,
    decode_reply,
    encode,
)
from shoal.models.tokenizer.tokenizer import WithChatTemplate, check_utf8
from shoal.serve.errors import MODEL_NOT_FOUND
from shoal.serve.tokenizer_subprocess import SubprocessEnded, TokenizerSubprocess

# Attempts for a message if the process ends meanwhile: the message may be the reason.
_ATTEMPTS = 2
# Messages beyond SHORT_BYTES are sent one at a time; those beyond this size have a queue of their own.
_LARGE_BYTES = 256 * 2**10
_RETRY_AFTER_S = 1.0

Answer = TypeVar("Answer", Encoded, Tokenized, Decoded)
_Key = tuple[str, str | None]
"""Digest of the tokenizer.json, and the BOS token that precedes every text, if any."""


class TokenizerWorker:
    """Encodes with one tokenizer, in a process that is restarted when it ends.

    load: which tokenizer the process reads.
    """

    def __init__(self, load: Load) -> None:
        self._load = encode(load)
        self._starting: asyncio.Task[TokenizerSubprocess] | None = None
        self._closed = False
        self._medium, self._large = asyncio.Lock(), asyncio.Lock()
        self._vocabulary: Vocabulary | None = None

    @property
    def vocabulary(self) -> Vocabulary:
        """The tokenizer's vocabulary, once it was read."""
        assert self._vocabulary is not None, "the tokenizer is not ready"
        return self._vocabulary

    async def read(self) -> None:
        """Read the tokenizer, unless that was done; raises ModelUnavailable if that fails."""
        for _ in range(_ATTEMPTS):
            if self._vocabulary is not None:
                return
            with suppress(SubprocessEnded):
                await self._running()
                return
        raise ModelUnavailable(f"the process that reads the tokenizer ended {_ATTEMPTS} times before it had")

    async def ask(self, question: TokenizerRequest, kind: type[Answer]) -> Answer:
        """The answer to a question, which is of this kind.

        Raises InvalidRequest for text that cannot be tokenized, ServiceUnavailable if it crashes processes.
        """
        message = encode(question)
        for _ in range(_ATTEMPTS):
            try:
                async with self._queue(len(message)):
                    answer = decode_reply(await (await self._running()).ask(message))
            except SubprocessEnded:
                continue
            except ModelUnavailable as error:
                raise ServiceUnavailable(str(error), _RETRY_AFTER_S) from error
            if isinstance(answer, Failed):
                raise InvalidRequest(f"this cannot be tokenised: {answer.reason}")
            assert isinstance(answer, kind)
            return answer
        raise ServiceUnavailable(
            f"the process that tokenises ended {_ATTEMPTS} times before it had an answer", _RETRY_AFTER_S
        )

    async def aclose(self) -> None:
        """End the process, and wait for its exit."""
        self._closed = True
        if self._starting is not None:
            self._starting.cancel()
            (process,) = await asyncio.gather(self._starting, return_exceptions=True)
            if isinstance(process, TokenizerSubprocess):
                await process.aclose()

    def _queue(self, message_bytes: int) -> AbstractAsyncContextManager[None]:
        if message_bytes <= SHORT_BYTES:
            return nullcontext()
        return self._medium if message_bytes <= _LARGE_BYTES else self._large

    async def _running(self) -> TokenizerSubprocess:
        if self._closed:
            raise _removed()
        starting = self._starting
        if starting is None or (starting.done() and not _is_alive(starting)):
            starting = self._starting = asyncio.create_task(self._start())
        try:
            return await asyncio.shield(starting)
        except asyncio.CancelledError:
            if starting.cancelled():
                raise _removed() from None
            raise

    async def _start(self) -> TokenizerSubprocess:
        try:
            process = await TokenizerSubprocess.start()
        except OSError as error:
            raise ModelUnavailable(f"the process that tokenises cannot be started: {error}") from error
        try:
            answer = decode_reply(await process.ask(self._load))
            if isinstance(answer, Failed):
                raise ModelUnavailable(answer.reason)
            assert isinstance(answer, Loaded)
            self._vocabulary = self._vocabulary or pickle.loads(answer.vocabulary)
        except BaseException:
            await process.aclose()
            raise
        return process


def _removed() -> InvalidRequest:
    return InvalidRequest("the model was removed meanwhile", "model", MODEL_NOT_FOUND)


def _is_alive(started: "asyncio.Task[TokenizerSubprocess]") -> bool:
    return not started.cancelled() and started.exception() is None and started.result().alive


class ServedTokenizer(WithChatTemplate):
    """The server's tokenizer of one service; implements ``TextCodec``."""

    def __init__(
        self,
        worker: TokenizerWorker,
        template: ChatTemplate | None,
        close: Callable[[], None],
    ) -> None:
        super().__init__(template)
        self._worker = worker
        self.close = close

    async def ready(self) -> None:
        try:
            await self._worker.read()
        except ModelUnavailable as error:
            raise ServiceUnavailable(str(error), _RETRY_AFTER_S) from error

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool = True) -> str:
        return self._worker.vocabulary.decode(tokens, skip_special_tokens)

    def token_bytes(self, token: int) -> bytes:
        return self._worker.vocabulary.token_bytes(token)

    def special_token(self, text: str) -> int | None:
        return self._worker.vocabulary.special_ids.get(text)

    async def encode_texts(
        self, texts: Sequence[str], add_special_tokens: bool = True, most_tokens: int | None = None
    ) -> Encoded:
        for text in texts:
            check_utf8(text)
        return await self._worker.ask(Encode(list(texts), add_special_tokens, most_tokens), Encoded)

    async def tokenize(self, text: str, add_special_tokens: bool, with_strings: bool) -> Tokenized:
        check_utf8(text)
        return await self._worker.ask(Tokenize(text, add_special_tokens, with_strings), Tokenized)

    async def detokenize(self, tokens: Sequence[int]) -> str:
        return (await self._worker.ask(Decode(list(tokens)), Decoded)).text


class Tokenizers:
    """Loads tokenizers; services with equal ones share a process."""

    def __init__(self) -> None:
        self._workers: dict[_Key, TokenizerWorker] = {}
        self._reference_counts: Counter[_Key] = Counter()
        self._ending: set[asyncio.Task[None]] = set()
        self._reading: asyncio.Task[None] | None = None

    async def load(
        self, folder: Path, chat_template: str | None = None, *, wait: bool = True
    ) -> ServedTokenizer:
        """The tokenizer of the model in ``folder``; arguments and errors as in ``Tokenizer.from_folder``.

        wait: until it is read; else that is done at its first use, or by ``read_all``.
        """
        described, digest = await to_thread.run_sync(_describe, folder, chat_template, abandon_on_cancel=True)
        bos_token = described.special_tokens.get("bos_token") if described.prepend_bos else None
        key = digest, bos_token
        if key not in self._workers:
            self._workers[key] = TokenizerWorker(Load(str(described.file), digest, bos_token))
        worker = self._workers[key]
        self._reference_counts[key] += 1
        try:
            if wait:
                await worker.read()
        except BaseException:
            self._release(key)
            raise
        return ServedTokenizer(worker, described.template, partial(self._release, key))

    def read_all(self) -> "asyncio.Task[None]":
        """Read all tokenizers in the background, one at a time; the task ends with the first error."""
        self._reading = asyncio.create_task(self._read_all())
        return self._reading

    async def _read_all(self) -> None:
        for worker in list(self._workers.values()):
            with suppress(InvalidRequest):  # removed meanwhile
                await worker.read()

    async def aclose(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.wait((self._reading,))
        workers = list(self._workers.values())
        await asyncio.gather(*(worker.aclose() for worker in workers), *self._ending)

    def _release(self, key: _Key) -> None:
        self._reference_counts[key] -= 1
        if not self._reference_counts[key]:
            ending = asyncio.create_task(self._workers.pop(key).aclose())
            self._ending.add(ending)
            ending.add_done_callback(self._ending.discard)


def _describe(folder: Path, chat_template: str | None) -> tuple[TokenizerDescription, str]:
    described = TokenizerDescription.read(folder, chat_template)
    return described, digest_of(described.file)
