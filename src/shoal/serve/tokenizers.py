"""The tokenizers of a server's services: each encodes in a process of its own, and decodes here.

Reading a tokenizer would stop all streams for seconds, and so would encoding megabytes of text.
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
    Question,
    Tokenize,
    Tokenized,
    decode_answer,
    encode,
)
from shoal.models.tokenizer.tokenizer import WithChatTemplate, check_utf8
from shoal.serve.errors import MODEL_NOT_FOUND
from shoal.serve.tokenizer_subprocess import ProcessGone, TokenizerLink

# How often a question is asked of a process that ends meanwhile: it may be what ends it.
_ATTEMPTS = 2
# Longer questions are asked one after another, and beyond this size in a queue of their own.
_LARGE_BYTES = 256 * 2**10
_RETRY_AFTER_S = 1.0

Answer = TypeVar("Answer", Encoded, Tokenized, Decoded)
_Key = tuple[str, str | None]
"""Digest of the tokenizer.json, and what is put before every text."""


class TokenizerProcess:
    """Encodes with one tokenizer, in a process that is replaced when it ends.

    load: tells the process what to read.
    """

    def __init__(self, load: Load) -> None:
        self._load = encode(load)
        self._starting: asyncio.Task[TokenizerLink] | None = None
        self._closed = False
        self._medium, self._large = asyncio.Lock(), asyncio.Lock()
        self._vocabulary: Vocabulary | None = None

    async def vocabulary(self) -> Vocabulary:
        """That of the tokenizer; raises ModelUnavailable where it cannot be read."""
        for _ in range(_ATTEMPTS):
            with suppress(ProcessGone):
                await self._running()
                assert self._vocabulary is not None
                return self._vocabulary
        raise ModelUnavailable(f"the process that reads the tokenizer ended {_ATTEMPTS} times before it had")

    async def ask(self, question: Question, kind: type[Answer]) -> Answer:
        """The answer to a question, which is of this kind.

        Raises InvalidRequest for what cannot be answered, ServiceUnavailable if processes end of it.
        """
        message = encode(question)
        for _ in range(_ATTEMPTS):
            try:
                async with self._lane(len(message)):
                    answer = decode_answer(await (await self._running()).ask(message))
            except ProcessGone:
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
        """End the process, and wait until it is gone."""
        self._closed = True
        if self._starting is not None:
            self._starting.cancel()
            (link,) = await asyncio.gather(self._starting, return_exceptions=True)
            if isinstance(link, TokenizerLink):
                await link.aclose()

    def _lane(self, message_bytes: int) -> AbstractAsyncContextManager[None]:
        if message_bytes <= SHORT_BYTES:
            return nullcontext()
        return self._medium if message_bytes <= _LARGE_BYTES else self._large

    async def _running(self) -> TokenizerLink:
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

    async def _start(self) -> TokenizerLink:
        try:
            link = await TokenizerLink.start()
        except OSError as error:
            raise ModelUnavailable(f"the process that tokenises cannot be started: {error}") from error
        try:
            answer = decode_answer(await link.ask(self._load))
            if isinstance(answer, Failed):
                raise ModelUnavailable(answer.reason)
            assert isinstance(answer, Loaded)
            self._vocabulary = self._vocabulary or pickle.loads(answer.vocabulary)
        except BaseException:
            await link.aclose()
            raise
        return link


def _removed() -> InvalidRequest:
    return InvalidRequest("the model was removed meanwhile", "model", MODEL_NOT_FOUND)


def _is_alive(started: "asyncio.Task[TokenizerLink]") -> bool:
    return not started.cancelled() and started.exception() is None and started.result().alive


class ServedTokenizer(WithChatTemplate):
    """A tokenizer as the server has it: ``TextCodec`` says what each method does."""

    def __init__(
        self,
        process: TokenizerProcess,
        vocabulary: Vocabulary,
        template: ChatTemplate | None,
        close: Callable[[], None],
    ) -> None:
        super().__init__(template)
        self._process = process
        self.close = close
        self.decode = vocabulary.decode
        self.token_bytes = vocabulary.token_bytes
        self._special_ids = vocabulary.special_ids

    def special_token(self, text: str) -> int | None:
        """The special token with this text; None where there is none."""
        return self._special_ids.get(text)

    async def encode_texts(
        self, texts: Sequence[str], add_special_tokens: bool = True, most_tokens: int | None = None
    ) -> Encoded:
        """Token ids of texts."""
        for text in texts:
            check_utf8(text)
        return await self._process.ask(Encode(list(texts), add_special_tokens, most_tokens), Encoded)

    async def tokenize(self, text: str, add_special_tokens: bool, with_strings: bool) -> Tokenized:
        """Token ids of a text as JSON."""
        check_utf8(text)
        return await self._process.ask(Tokenize(text, add_special_tokens, with_strings), Tokenized)

    async def detokenize(self, tokens: Sequence[int]) -> str:
        """The text of many tokens."""
        return (await self._process.ask(Decode(list(tokens)), Decoded)).text


class Tokenizers:
    """Reads tokenizers; services with the same one share its process."""

    def __init__(self) -> None:
        self._processes: dict[_Key, TokenizerProcess] = {}
        self._users: Counter[_Key] = Counter()
        self._ending: set[asyncio.Task[None]] = set()

    async def load(self, folder: Path, chat_template: str | None = None) -> ServedTokenizer:
        """That of the model in ``folder``; arguments and errors are those of ``Tokenizer.from_folder``."""
        described, digest = await to_thread.run_sync(_describe, folder, chat_template, abandon_on_cancel=True)
        bos_token = described.special_tokens.get("bos_token") if described.prepend_bos else None
        key = digest, bos_token
        if key not in self._processes:
            self._processes[key] = TokenizerProcess(Load(str(described.file), digest, bos_token))
        process = self._processes[key]
        self._users[key] += 1
        try:
            vocabulary = await process.vocabulary()
        except BaseException:
            self._release(key)
            raise
        return ServedTokenizer(process, vocabulary, described.template, partial(self._release, key))

    async def aclose(self) -> None:
        """End all processes."""
        processes = list(self._processes.values())
        await asyncio.gather(*(process.aclose() for process in processes), *self._ending)

    def _release(self, key: _Key) -> None:
        self._users[key] -= 1
        if not self._users[key]:
            ending = asyncio.create_task(self._processes.pop(key).aclose())
            self._ending.add(ending)
            ending.add_done_callback(self._ending.discard)


def _describe(folder: Path, chat_template: str | None) -> tuple[TokenizerDescription, str]:
    described = TokenizerDescription.read(folder, chat_template)
    return described, digest_of(described.file)
