"""The process that encodes with one tokenizer; ``python -m shoal.models.tokenizer.process DESCRIPTOR``.

Reading a tokenizer holds the interpreter's lock for seconds, and encoding and writing down megabytes of
tokens holds it again and again. So a server leaves that to a process of its own for each tokenizer, and keeps
what it needs for the way back, the ``Vocabulary``.
"""

import ctypes
import os
import pickle
import signal
import socket
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import IO

from shoal.core import ShoalError
from shoal.models.tokenizer.encoding import encode_texts, tokenize
from shoal.models.tokenizer.load import digest_of, load_backend
from shoal.models.tokenizer.messages import (
    HEADER,
    SHORT_BYTES,
    Answer,
    Decode,
    Decoded,
    Encode,
    Failed,
    Load,
    Loaded,
    Question,
    Tokenize,
    decode_question,
    encode,
)
from shoal.models.tokenizer.tokenizer import Tokenizer
from shoal.models.tokenizer.vocabulary import Vocabulary

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class _Process:
    """Answers the questions that come over ``channel``: short ones as they come, others each in a thread."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._sending = threading.Lock()
        self._tokenizer: Tokenizer | None = None

    def run(self) -> None:
        """Answer until the other end is closed."""
        with self._channel.makefile("rb") as source:
            while (frame := _read(source)) is not None:
                number, message = frame
                if len(message) <= SHORT_BYTES:
                    self._answer(number, message)
                else:
                    threading.Thread(target=self._answer, args=frame, daemon=True).start()

    def _answer(self, number: int, message: bytes) -> None:
        try:
            answer = encode(self._find(decode_question(message)))
        except BaseException as error:  # the library panics, which is no Exception
            kind = "" if isinstance(error, ShoalError) else f"{type(error).__name__}: "
            answer = encode(Failed(f"{kind}{error!s:.1000}"))
        with self._sending, suppress(ConnectionError):  # then the server is gone, and so is this soon
            self._channel.sendall(HEADER.pack(number, len(answer)))
            self._channel.sendall(answer)
        if len(message) > SHORT_BYTES:
            _free_memory()

    def _find(self, question: Question) -> Answer:
        if isinstance(question, Load):
            return self._load(question)
        tokenizer = self._tokenizer
        assert tokenizer is not None, "the first question is Load"
        match question:
            case Encode():
                return encode_texts(
                    tokenizer, question.texts, question.add_special_tokens, question.most_tokens
                )
            case Tokenize():
                return tokenize(tokenizer, question.text, question.add_special_tokens, question.with_strings)
            case Decode():
                return Decoded(tokenizer.decode(question.tokens, skip_special_tokens=False))

    def _load(self, load: Load) -> Answer:
        file = Path(load.file)
        if digest_of(file) != load.digest:
            return Failed(f"{file} has been replaced since it was first read")
        backend = load_backend(file)
        self._tokenizer = Tokenizer(
            backend,
            special_tokens={} if load.bos_token is None else {"bos_token": load.bos_token},
            eos_token_ids=(),
            prepend_bos=load.bos_token is not None,
        )
        self._tokenizer.least_tokens("")  # reads the vocabulary once, so that no text waits for it
        vocabulary = pickle.dumps(Vocabulary.of(backend))
        _free_memory()
        return Loaded(vocabulary)


def _free_memory() -> None:
    """Give back what is not used: of what reading a tokenizer takes, more than half is left over."""
    with suppress(AttributeError):  # only glibc keeps it
        ctypes.CDLL(None).malloc_trim(0)


def _read(source: IO[bytes]) -> tuple[int, bytes] | None:
    """The next question's number and message; None at the end."""
    header = source.read(HEADER.size)
    if len(header) < HEADER.size:
        return None
    number, length = HEADER.unpack(header)
    message = source.read(length)
    return (number, message) if len(message) == length else None


def main() -> None:
    """Serve the socket with the inherited descriptor that the argument names."""
    for number in _SIGNALS:  # the end of the server is the end of this
        signal.signal(number, signal.SIG_IGN)
    with suppress(ConnectionError):
        _Process(socket.socket(fileno=int(sys.argv[1]))).run()
    os._exit(0)  # whatever its threads do


if __name__ == "__main__":
    main()
